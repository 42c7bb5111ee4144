"""When a process hangs, and whose fault that is. Pure.

The agent asks each process that speaks with it, about once a second, where it is. A process is *stalled* if it is in
the same step for longer than a factor times its slowest recent step, and longer than a floor. In a step where one rank
does not arrive all others wait in a collective; so of the stalled processes only one that does *not* wait is to blame.
One that does not even answer holds the interpreter's lock, which nobody does who waits in a collective of ours.

Invariant: a process outside of a step (evaluation between two steps) is never called hung.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FACTOR = 10.0  # if nothing else is said
ASK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Where:
    """What a process says: the step that it is in (None: between two), whether a collective of it waits for others, and
    seconds of its slowest recent step."""

    step: int | None
    waits: bool
    slowest: float


@dataclass(frozen=True, slots=True)
class Watch:
    """Of one process. `stalled`: seconds in the step in which it was seen last, as far as it was looked at: an agent
    that was stopped itself knows nothing of that time. `looked`: when, by any clock. `factor` 0: the floor is the
    limit."""

    floor: float
    factor: float = FACTOR
    step: int | None = None
    stalled: float = 0.0
    looked: float = 0.0
    slowest: float = 0.0

    @property
    def limit(self) -> float:
        return max(self.floor, self.factor * self.slowest)


def look(watch: Watch, where: Where | None, now: float) -> tuple[Watch, bool]:
    """The watch after an answer, or None in place of one; and whether the process hangs and is to blame."""
    passed = min(now - watch.looked, 2 * ASK_SECONDS)
    watch = replace(watch, looked=now)
    if where is not None and (where.step is None or where.step != watch.step):
        return replace(watch, step=where.step, stalled=0.0, slowest=where.slowest), False
    if watch.step is None:
        return watch, False
    watch = replace(watch, stalled=watch.stalled + passed)
    waits = where is not None and where.waits
    return watch, watch.stalled > watch.limit and not waits
