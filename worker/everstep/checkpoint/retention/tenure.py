"""Whether a writer still owns the log, asked again and again while it deletes.

What a writer may delete follows from its own rules and from what it knew of the log. Another one that has taken the log
may keep more, so the right to delete ends with a newer open record. A store has no deletion with a condition, so there
is a look at the end of the log before, and it counts for `LOOK_SECONDS` only, by two clocks: a process that was stopped
between a look and a request looks again when it wakes. One request that is already on its way cannot be called back.

Invariant: between two deletions lie at most `LOOK_SECONDS`, or a look.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from everstep.checkpoint.log.commitlog import CommitLog

LOOK_SECONDS: Final = 5.0


class Tenure:
    """Of the writer whose newest commit is record `newest`, above its own open record. Raises `StorageError`."""

    def __init__(
        self, log: CommitLog, newest: int, now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._log = log
        self._last = newest
        self._now, self._clock = now, clock
        self._looked: tuple[float, float] | None = None
        self.ended_by: int | None = None  # the record by which another writer took the log

    def lasts(self) -> bool:
        """Whether nobody else had opened the log at the last look, which is at most `LOOK_SECONDS` old."""
        if self.ended_by is None and not self._is_fresh():
            # Before the look: what it shows may be as old as its beginning.
            self._looked = self._now(), self._clock()
            self._last, self.ended_by = self._log.opened_after(self._last)
        return self.ended_by is None

    def _is_fresh(self) -> bool:
        if self._looked is None:
            return False
        now, clock = self._looked
        return 0 <= self._now() - now < LOOK_SECONDS and self._clock() - clock < LOOK_SECONDS
