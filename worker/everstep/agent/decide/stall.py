"""When a process hangs, and when it waits for one that does. Pure.

The agent asks each process that speaks with it, about once a second, where it is. A process is *stalled* if since then
it has neither come to another step nor begun or ended a collective, for longer than a factor times its slowest recent
step, and longer than a floor. In a step where one rank does not arrive all others wait in a collective; so of the
stalled processes only one that does *not* wait is to blame. One that does not even answer holds the interpreter's lock,
which nobody does who waits in a collective of ours.

Invariant: a process outside of a step (evaluation between two steps) is never called hung.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from everstep.contract.calls import Call

FACTOR = 10.0  # if nothing else is said
FIRST_FACTOR = 10.0  # of the floor: the first step of a process compiles, and nothing says how long its steps are
ASK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What a process says: the step that it is in (None: between two), whether a collective of it waits for others, and
    seconds of its slowest recent step. `call`: the program's collective that waits, None if none or if it is one of
    ours between two steps; `recent`: the program's newest, oldest first."""

    step: int | None
    waits: bool
    slowest: float
    call: Call | None = None
    recent: tuple[Call, ...] = ()

    @property
    def place(self) -> object:
        """What changes when the process goes on."""
        return self.step, self.waits, self.call, self.recent[-1:]


class Found(Enum):
    GOES_ON = auto()
    WAITS = auto()  # for too long, for others
    HANGS = auto()


@dataclass(frozen=True, slots=True)
class Watch:
    """Of one process. `stalled`: seconds for which it is where it was seen last, as far as it was looked at: an agent
    that was stopped itself knows nothing of that time. `looked`: when, by any clock. `factor` 0: the floor is the
    limit."""

    floor: float
    factor: float = FACTOR
    where: ProcessState | None = None
    stalled: float = 0.0
    looked: float = 0.0

    @property
    def limit(self) -> float:
        slowest = self.where.slowest if self.where is not None else 0.0
        if not slowest and self.factor:
            return FIRST_FACTOR * self.floor
        return max(self.floor, self.factor * slowest)


def look(watch: Watch, where: ProcessState | None, now: float) -> tuple[Watch, Found]:
    """The watch after an answer, or None in place of one; and what it shows."""
    passed = min(now - watch.looked, 2 * ASK_SECONDS)
    watch = replace(watch, looked=now)
    if where is not None and (watch.where is None or where.place != watch.where.place):
        return replace(watch, where=where, stalled=0.0), Found.GOES_ON
    last = watch.where
    if last is None or (last.step is None and not last.waits):
        return watch, Found.GOES_ON
    watch = replace(watch, stalled=watch.stalled + passed)
    if watch.stalled <= watch.limit:
        return watch, Found.GOES_ON
    if where is not None and where.waits:
        return watch, Found.WAITS
    return watch, Found.HANGS if last.step is not None else Found.GOES_ON
