"""Tells a process that hangs from one that waits for it. Pure.

About once a second, the agent asks each process that speaks with it where it is. A process is *stalled* if it has
neither reached another step nor begun or ended a collective for longer than a factor times its slowest recent step, and
longer than a floor. If one rank does not arrive, all others wait in a collective. So of the stalled processes, only one
that does *not* wait is to blame. A process that does not even answer holds the interpreter's lock, which no process
does that waits in one of our collectives.

Invariant: a process outside of a step (evaluation between two steps) is never said to hang.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from everstep.contract.calls import StepStatus

FACTOR = 10.0  # the default
FIRST_FACTOR = 10.0  # times the floor: a process's first step may compile, and the length of its steps is not known yet
ASK_SECONDS = 1.0


class Finding(Enum):
    GOES_ON = auto()
    WAITS = auto()  # for other processes, for too long
    HANGS = auto()


@dataclass(frozen=True, slots=True)
class Watch:
    """The observations of one process. `stalled`: seconds without progress. Time in which the agent itself was stopped
    does not count. `looked`: when it was last observed, by any clock. `factor` 0: the floor is the limit."""

    floor: float
    factor: float = FACTOR
    where: StepStatus | None = None
    stalled: float = 0.0
    looked: float = 0.0

    @property
    def limit(self) -> float:
        slowest = self.where.slowest if self.where is not None else 0.0
        if not slowest and self.factor:
            return FIRST_FACTOR * self.floor
        return max(self.floor, self.factor * slowest)


def look(watch: Watch, where: StepStatus | None, now: float) -> tuple[Watch, Finding]:
    """The watch after an answer (`where` is None if none came), and the finding."""
    passed = min(now - watch.looked, 2 * ASK_SECONDS)
    watch = replace(watch, looked=now)
    if where is not None and (watch.where is None or where.progress != watch.where.progress):
        return replace(watch, where=where, stalled=0.0), Finding.GOES_ON
    last = watch.where
    if last is None or (last.step is None and not last.waits):
        return watch, Finding.GOES_ON
    watch = replace(watch, stalled=watch.stalled + passed)
    if watch.stalled <= watch.limit:
        return watch, Finding.GOES_ON
    if where is not None and where.waits:
        return watch, Finding.WAITS
    return watch, Finding.HANGS if last.step is not None else Finding.GOES_ON
