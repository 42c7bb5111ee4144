"""Sets the global generators of numpy and Python at each step, at the price of a copy.

Both are Mersenne Twisters of 624 words, and seeding them takes longer than all else that a step's random numbers need.
So their states are made ahead, for many steps at once.

Numpy's words are drawn by Philox4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC'11): a
bijection of a counter, which passes BigCrush. Each step and rank has its own part of the counter. So the states of a
run are as independent as Philox's words, and do not depend on where a process begins. Python's words are those that
`random.seed` makes.

Between two steps the model fills the processor's caches, so this code and its data are never in them. Therefore the
work of a step is short here, and uses few objects.
"""

from __future__ import annotations

import _random
import ctypes
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from everstep.recovery.errors import LoopError

WORDS: Final = 624  # of 32 bits
COUNTERS: Final = WORDS // 8  # each makes eight words
BEGINNING: Final = slice(8)  # bytes of a state


class NumpyTwister:
    """Sets numpy's generator. `bits`: numpy's MT19937. Its state in memory is 624 words and the number of used ones;
    numpy gives the address. To set it, hold `lock` and copy one of `ahead` to `place`; keep its second part as `first`.
    Call `forget` before, unless `beginning[0]` is still `first`: a draw changes all words.
    """

    __slots__ = ("_bits", "beginning", "first", "lock", "place")

    def __init__(self, bits: Any) -> None:
        self._bits = bits
        self.lock = bits.lock  # without it a draw in another thread could find all words used, and use one more
        self.place = _memory(bits.ctypes.state_address)
        self.beginning = self.place[BEGINNING].cast("Q")
        self.first = -1

    def ahead(self, key: tuple[int, int], step: int, rank: int, steps: int) -> list[tuple[memoryview, int]]:
        """For each of so many steps from this one: the state, and its bytes at `BEGINNING`."""
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
        states = [memoryview(row).cast("B") for row in rows]
        return [(state, state[BEGINNING].cast("Q")[0]) for state in states]

    def forget(self) -> None:
        """Forget the second one of a pair of normal numbers, which numpy keeps for the next call."""
        np.random.seed(0)


class PythonTwister:
    """Sets Python's generator. `generator`: a `random.Random`. Its state in memory is the number of used words and 624
    words, after the header of each object. To set it, copy one of `ahead` to `place`, and set its `gauss_next` to
    None."""

    __slots__ = ("generator", "place")

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self.place = _memory(id(generator) + object.__basicsize__)

    @staticmethod
    def fits(generator: Any) -> bool:
        """Whether this interpreter keeps the state at that place."""
        end = object.__basicsize__ + 4 * (WORDS + 1)
        if not end <= _random.Random.__basicsize__ < end + 8:
            return False
        *words, used = generator.getstate()[1]
        return list(_memory(id(generator) + object.__basicsize__).cast("I")) == [used, *words]

    @staticmethod
    def ahead(values: Sequence[int]) -> list[bytes]:
        """The states that `random.seed` makes of these values."""
        scratch = _random.Random()
        state, found = _memory(id(scratch) + object.__basicsize__), []
        for value in values:
            scratch.seed(value)
            found.append(bytes(state))
        return found


def _memory(address: int) -> memoryview:
    """The memory of a twister's state at this address."""
    return memoryview((ctypes.c_uint8 * (4 * (WORDS + 1))).from_address(address)).cast("B")
