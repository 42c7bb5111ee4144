"""When to save: pure, with the time as an argument."""

from __future__ import annotations

from enum import IntEnum


class Verdict(IntEnum):
    """Rank 0's answer; one byte to the others."""

    NOT_NOW = 0
    SAVE = 1
    BUSY = 2  # due, but the save before is still in flight
    FENCED = 3


class SavePolicy:
    """Due every `every_steps` steps, or `every_seconds` seconds after the last save began; `now` is monotonic."""

    def __init__(self, every_seconds: float | None, every_steps: int | None, now: float) -> None:
        self._every_seconds = every_seconds
        self._every_steps = every_steps
        self._last = now

    def candidate(self, step: int) -> bool:
        """Whether `decide` might answer that a save is due. Every rank knows this without asking another one."""
        return self.by_steps(step) or self._every_seconds is not None

    def by_steps(self, step: int) -> bool:
        """Whether a save is due at this step by its number."""
        return self._every_steps is not None and step % self._every_steps == 0

    def decide(self, step: int, now: float, *, busy: bool) -> Verdict:
        by_time = self._every_seconds is not None and now - self._last >= self._every_seconds
        if not self.by_steps(step) and not by_time:
            return Verdict.NOT_NOW
        return Verdict.BUSY if busy else Verdict.SAVE

    def saved(self, now: float) -> None:
        """A save or training has begun at `now`."""
        self._last = now
