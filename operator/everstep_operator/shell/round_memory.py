"""What a leader remembers of one job's rounds: lost with the leadership, and read or announced again at the next."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from everstep.contract.document import Document
from everstep_operator.shell.presence import Presences
from everstep_operator.shell.round_documents import JobRef, Kept, RoundsUnavailable
from everstep_operator.shell.round_watches import Watches

BURST, RATE = 200.0, 20.0  # documents written for one job: at once, and a second


@dataclass(slots=True)
class RememberedJob:
    """`lock` is held by who reads or writes the document. Times are the clock's monotonic seconds."""

    ref: JobRef
    epoch: int  # of the leadership that remembers this
    presences: Presences
    watches: Watches
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    kept: Kept | None = None  # None: not known
    document: Document | None = None
    urgent: int = 0  # the version that brought news which are told at once or soon
    read: bool = False  # once
    read_at: float = 0.0
    tokens: float = BURST
    refilled_at: float = 0.0
    timer: asyncio.TimerHandle | None = None
    writing: asyncio.TimerHandle | None = None  # of wishes, soon
    written_at: float = float("-inf")
    writer: tuple[int, str, float] = (-1, "", 0.0)  # at this version, this pod was told who is present, then
    answer: tuple[int, bytes] = (-1, b"")  # of `present`, at a number of changes

    def spend(self, now: float) -> None:
        """One more document is about to be written. Raises RoundsUnavailable if there were too many."""
        self.tokens = min(BURST, self.tokens + (now - self.refilled_at) * RATE)
        self.refilled_at = now
        if self.tokens < 1:
            raise RoundsUnavailable(f"the job's document is written more than {RATE:g} times a second")
        self.tokens -= 1
