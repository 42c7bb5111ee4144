"""Finds stragglers: ranks that hold the others up. Pure: the clock and the comparison are arguments.

A step takes equally long on all ranks, because they wait for each other in it. The difference is in a rank's own time,
in which it waits for no other rank. Ranks compare the median of their own times after the 8th, 16th, 32nd and 64th step
of a world, and then every 64 steps. A save or another pause in a few steps does not change the median. Invariant: ranks
compare after the same steps.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FACTOR = 2.5  # a straggler needs more than this many times the others' time
LEAST = 0.005  # seconds of a rank's own time in a step; less is noise
FIRST, EVERY = 8, 64
CONFIRMED = 2  # comparisons in a row that name the same rank
MICRO = 1e-6


@dataclass(frozen=True, slots=True)
class Straggler:
    """The others wait for `rank`. Its own seconds in a step, and the median of the others'."""

    rank: int
    own: float
    others: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: {self.own:.3g} s of its own in a step, the others {self.others:.3g} s; "
            "they wait for it"
        )


@dataclass(frozen=True, slots=True)
class NoStraggler:
    """The ranks no longer wait for one of them."""

    def __str__(self) -> str:
        return "no rank is slower than the others any more"


def slowest(own: Sequence[float]) -> Straggler | None:
    """The straggler, from the time that each rank needs; None if there is none."""
    if len(own) < 2:
        return None
    rank = max(range(len(own)), key=lambda r: own[r])
    others = statistics.median([seconds for r, seconds in enumerate(own) if r != rank])
    return Straggler(rank, own[rank], others) if own[rank] > max(LEAST, FACTOR * others) else None


class StragglerDetector:
    """Compares the ranks of one world; each rank has one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.moved(0.0)

    def moved(self, waited: float) -> None:
        """The world has changed. `waited`: seconds that this process has waited in collectives so far."""
        self._own: deque[float] = deque(maxlen=EVERY)
        self._steps, self._seen, self._reported = 0, [-1] * CONFIRMED, -1
        self._mark = (self._clock(), waited)

    def completed(self, waited: float, gather: Callable[[int], Sequence[int]]) -> Straggler | NoStraggler | None:
        """A step is complete on all ranks. `gather`: every rank's number, by rank; collective. What is new to say."""
        now, (then, before) = self._clock(), self._mark
        self._mark = (now, waited)
        self._own.append(max(0.0, now - then - (waited - before)))
        self._steps += 1
        if not _compares(self._steps):
            return None
        straggler = slowest([number * MICRO for number in gather(int(statistics.median(self._own) / MICRO))])
        # The comparison itself does not count as a rank's own time.
        self._mark = (self._clock(), waited)
        self._seen = [*self._seen[1:], straggler.rank if straggler is not None else -1]
        if straggler is not None and set(self._seen) == {straggler.rank} and self._reported != straggler.rank:
            self._reported = straggler.rank
            return straggler
        if straggler is None and self._reported >= 0:
            self._reported = -1
            return NoStraggler()
        return None


def _compares(step: int) -> bool:
    return step % EVERY == 0 or (step < EVERY and step >= FIRST and step & (step - 1) == 0)
