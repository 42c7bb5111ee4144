"""numpy's global generator, set anew at each step at the price of a copy.

Seeding it takes longer than all else that a step's random numbers need. So the 624 words of its state are drawn ahead,
for many steps at once, by Philox4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC'11): a
bijection of a counter, which passes BigCrush. Each step and rank has a part of the counter to itself, so the states of
a run are independent as far as Philox's words are, and where a process begins does not matter.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

from everstep.train.step import LoopError

WORDS: Final = 624  # of 32 bits
COUNTERS: Final = WORDS // 8  # each makes eight words


class Twister:
    """`bits`: numpy's MT19937. Its state is 624 words and how many of them are used, where numpy says that it is."""

    def __init__(self, bits: Any) -> None:
        self._bits = bits
        place = (ctypes.c_uint8 * (4 * WORDS + 4)).from_address(bits.ctypes.state_address)
        self._state: Any = memoryview(place).cast("B")
        self._set: bytes | None = None  # the first words that it was last set to: a draw changes them all

    def ahead(self, key: tuple[int, int], step: int, rank: int, steps: int) -> list[memoryview]:
        """The states of so many steps."""
        if np.random.get_bit_generator() is not self._bits:  # type: ignore[attr-defined]  # not in numpy's stub
            raise LoopError(
                "np.random.set_bit_generator(…) in the loop: the numbers of the new one do not follow from the step. "
                "Call it before run.steps(), or draw from a generator that is tracked: run.track(noise=generator)"
            )
        counter = np.array([step * COUNTERS, 0, rank, 0], np.uint64)
        philox = np.random.Philox(counter=counter, key=np.array([key[0] << 32 | key[1], 0], np.uint64))
        drawn: Any = philox.random_raw(steps * WORDS // 2)
        rows: Any = np.full((steps, WORDS + 1), WORDS, np.uint32)  # all words are used: the first draw makes new ones
        rows[:, :WORDS] = drawn.view(np.uint32).reshape(steps, WORDS)
        return [memoryview(row).cast("B") for row in rows]

    def set(self, state: memoryview) -> None:
        """To one of `ahead`."""
        if self._state[:8] != self._set:
            np.random.seed(0)  # forget the second one of a pair of normal numbers
        with self._bits.lock:
            self._state[:] = state
        self._set = state[:8].tobytes()
