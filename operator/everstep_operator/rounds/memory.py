"""What a leader remembers of each job's rounds: lost with the leadership, and read or announced again at the next.

But a replica that leads again, with nobody in between, remembers who was present: a Lease that was lost for a moment
costs nobody who waits for a round its place. Invariant: what is handed out belongs to the present leadership.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.contract.document import Document
from everstep_operator.rounds.documents import JobRef, RoundsUnavailable, StoredDocument
from everstep_operator.rounds.presence import Presences, Worker
from everstep_operator.rounds.watches import Urgency, Watches
from everstep_operator.runtime.clock import Clock
from everstep_operator.runtime.errors import NotLeading

BURST, RATE = 200.0, 20.0  # documents written for one job: at once, and a second


@dataclass(slots=True)
class RememberedJob:
    """`lock` is held by who reads or writes the document. Times are the clock's monotonic seconds."""

    ref: JobRef
    epoch: int  # of the leadership that remembers this
    presences: Presences
    watches: Watches
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    kept: StoredDocument | None = None  # None: not known
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

    def stop(self) -> None:
        """Nothing more is done for it, and whoever waits is told to look elsewhere."""
        for timer in filter(None, (self.timer, self.writing)):
            timer.cancel()
        self.watches.wake(Urgency.NOW)


class Memory:
    """For one replica. `epoch` is that of its leadership and raises when it does not lead; `resumed` is told of a job
    whose agents are remembered from the leadership before."""

    def __init__(self, clock: Clock, epoch: Callable[[], int], resumed: Callable[[RememberedJob], None]) -> None:
        self._clock, self._epoch, self._resumed = clock, epoch, resumed
        self._jobs: dict[str, RememberedJob] = {}
        self._left: dict[str, RememberedJob] = {}  # those of the last leadership

    def of(self, ref: JobRef) -> RememberedJob:
        """What is remembered of the job, from now on if nothing is. Raises NotLeading."""
        epoch = self._epoch()
        job = self._jobs.get(ref.uid)
        if job is not None and job.epoch != epoch:
            self.forget_all()
            job = None
        return job or self._begin(ref, epoch)

    def remembers(self, job: RememberedJob) -> bool:
        """Whether this is what is remembered: not of a job that is gone, or of another leadership."""
        return self._jobs.get(job.ref.uid) is job

    def withdraw_pod(self, uid: str, worker: Worker) -> RememberedJob | None:
        """A pod of that job is dead: so are its agents. The job, if it had any."""
        if (left := self._left.get(uid)) is not None:
            left.presences.withdraw_pod(worker)
        job = self._jobs.get(uid)
        return job if job is not None and job.presences.withdraw_pod(worker) else None

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._left.pop(uid, None)
        job = self._jobs.pop(uid, None)
        if job is not None:
            job.stop()

    def forget_all(self) -> None:
        """The leadership changed: what is remembered may be old, and whoever waits here must look again."""
        try:
            epoch = self._epoch()
        except NotLeading:
            epoch = -1
        old = {uid: job for uid, job in self._jobs.items() if job.epoch != epoch}
        if old:
            self._left = old
        for uid, job in old.items():
            del self._jobs[uid]
            job.stop()

    @property
    def watching(self) -> int:
        """How many calls wait for news."""
        return sum(len(job.watches) for job in self._jobs.values())

    def _begin(self, ref: JobRef, epoch: int) -> RememberedJob:
        now = self._clock.monotonic()
        # Another leader's count of expirations is not known here: every epoch counts in a range of its own.
        job = RememberedJob(ref, epoch, Presences(epoch << 32, now), Watches(), refilled_at=now)
        self._jobs[ref.uid] = job
        left = self._left.pop(ref.uid, None)
        if left is not None and left.epoch + 1 == epoch:
            left.presences.resume(epoch << 32, now)
            job.presences, job.read = left.presences, left.read
            self._resumed(job)
        return job
