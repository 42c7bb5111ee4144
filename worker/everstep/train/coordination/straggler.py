"""Finds stragglers: ranks that hold the others up. Pure: the clock and the comparison are arguments.

A step takes equally long on all ranks, because they wait for each other in it. The difference is in a rank's own time,
in which it waits for no other rank. Ranks compare the middle of their own times after the 8th, 16th, 32nd and 64th step
of a world, and then every 64 steps. A save or another pause in a few steps does not change it.

A rank that needs much longer is named after 16 steps. One that needs 1.3 times as long is named after 64, if it is so
steadily: a quarter of its steps may be quicker than a quarter of another rank's, but no more. Chance looks different.

Invariant: ranks compare after the same steps, and come to the same result.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

MUCH, STEADY = 2.5, 1.25  # a straggler needs more than this many times the others' time
SURE = 32  # steps, from which on a steady difference counts
LEAST = 0.005  # seconds of a rank's own time in a step; less is noise
SHARE = 0.05  # of a step; a smaller difference is not felt
FIRST, EVERY = 8, 64
CONFIRMED = 2  # comparisons in a row that name the same rank
MICRO = 1e-6


class Cause(StrEnum):
    """Where a straggler's time goes. That of a slow network is no rank's own, and is not seen here."""

    INPUT = "input"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a rank in a step of the last ones: the middle of its own time, of that the time for its next batch,
    and of the whole step. `quick` and `late`: a quarter of its own times is below, and above."""

    own: float
    quick: float
    late: float
    input: float
    step: float

    def numbers(self) -> tuple[int, ...]:
        return tuple(int(seconds / MICRO) for seconds in (self.own, self.quick, self.late, self.input, self.step))

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Pace:
        return cls(*(number * MICRO for number in numbers))


@dataclass(frozen=True, slots=True)
class Straggler:
    """The others wait for `rank`. Its own seconds in a step, the middle of the others', and where the difference is;
    None: the run has no loader of ours, so this is not known."""

    rank: int
    own: float
    others: float
    cause: Cause | None

    def __str__(self) -> str:
        where = {Cause.INPUT: "it waits longer for its next batch", Cause.COMPUTE: "not in its input"}
        more = "" if self.cause is None else f"; most of the difference: {where[self.cause]}"
        return (
            f"rank {self.rank} is slow: {self.own:.3g} s of its own in a step, the others {self.others:.3g} s; "
            f"they wait for it{more}"
        )


@dataclass(frozen=True, slots=True)
class NoStraggler:
    """The ranks no longer wait for one of them."""

    def __str__(self) -> str:
        return "no rank is slower than the others any more"


def slowest(paces: Sequence[Pace], steps: int) -> Straggler | None:
    """The straggler, from the paces of all ranks in so many steps; None if there is none."""
    if len(paces) < 2:
        return None
    rank = max(range(len(paces)), key=lambda r: paces[r].own)
    mine, rest = paces[rank], [pace for r, pace in enumerate(paces) if r != rank]
    others = statistics.median([pace.own for pace in rest])
    more = mine.own - others
    is_much = mine.own > max(LEAST, MUCH * others)
    is_steady = mine.own > STEADY * others and mine.quick > max(pace.late for pace in rest)
    is_felt = more > max(LEAST, SHARE * paces[0].step)
    if not (is_much or (steps >= SURE and is_steady and is_felt)):
        return None
    if not any(pace.input for pace in paces):
        return Straggler(rank, mine.own, others, None)
    waits = mine.input - statistics.median([pace.input for pace in rest])
    return Straggler(rank, mine.own, others, Cause.INPUT if 2 * waits > more else Cause.COMPUTE)


class StragglerDetector:
    """Compares the ranks of one world; each rank has one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.moved(0.0, 0.0)

    def moved(self, waited: float, fetched: float) -> None:
        """The world has changed. `waited`: seconds that this process has waited in collectives so far; `fetched`: for
        batches."""
        self._own: deque[float] = deque(maxlen=EVERY)
        self._input: deque[float] = deque(maxlen=EVERY)
        self._whole: deque[float] = deque(maxlen=EVERY)
        self._steps, self._seen, self._reported = 0, [-1] * CONFIRMED, -1
        self._mark = (self._clock(), waited, fetched)

    def completed(
        self, waited: float, fetched: float, gather: Callable[[Sequence[int]], Sequence[Sequence[int]]]
    ) -> Straggler | NoStraggler | None:
        """A step is complete on all ranks. `gather`: every rank's numbers, by rank; collective. What is new to say."""
        now, (then, waited_before, fetched_before) = self._clock(), self._mark
        self._mark = (now, waited, fetched)
        self._whole.append(now - then)
        self._own.append(max(0.0, now - then - (waited - waited_before)))
        self._input.append(max(0.0, fetched - fetched_before))
        self._steps += 1
        if not _compares(self._steps):
            return None
        paces = [Pace.of(numbers) for numbers in gather(self._pace().numbers())]
        straggler = slowest(paces, len(self._own))
        # The comparison itself does not count as a rank's own time.
        self._mark = (self._clock(), waited, fetched)
        self._seen = [*self._seen[1:], straggler.rank if straggler is not None else -1]
        if straggler is not None and set(self._seen) == {straggler.rank} and self._reported != straggler.rank:
            self._reported = straggler.rank
            return straggler
        if straggler is None and self._reported >= 0:
            self._reported = -1
            return NoStraggler()
        return None

    def _pace(self) -> Pace:
        own = sorted(self._own)
        quick, late = own[len(own) // 4], own[-1 - len(own) // 4]
        return Pace(statistics.median(own), quick, late, statistics.median(self._input), statistics.median(self._whole))


def _compares(step: int) -> bool:
    return step % EVERY == 0 or (step < EVERY and step >= FIRST and step & (step - 1) == 0)
