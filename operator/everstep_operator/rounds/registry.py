"""The round store in the operator: each job has one document, changed by compare-and-swap and watched, and presences.

`job_rounds` has the state of one job; this module has the jobs that this leader knows. Its memory is lost with the
leadership: the next leader reads the documents again, and the agents announce themselves to it. But a replica that
leads again, with no other leader in between, remembers which agents were present: if the Lease is lost for a moment, no
waiting agent is forgotten. Invariant: an answer belongs to the present leadership.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from everstep_operator.round_view import RoundView
from everstep_operator.rounds.document_reader import DocumentReader
from everstep_operator.rounds.documents import JobRef, RoundDocuments, WriteFailure
from everstep_operator.rounds.job_rounds import Environment, JobRounds
from everstep_operator.rounds.presence import Presences, Worker
from everstep_operator.runtime.clock import Clock
from everstep_operator.runtime.errors import NotLeading

log = logging.getLogger("everstep.rounds")


class RoundRegistry:
    """The store of one replica, in one event loop. `epoch` gives the epoch of its leadership; raises without one."""

    def __init__(
        self,
        documents: RoundDocuments,
        *,
        clock: Clock,
        epoch: Callable[[], int],
        changed: Callable[[JobRef], None] = lambda _: None,
    ) -> None:
        """`changed` is called when a job's view may have changed."""
        self._clock, self._epoch = clock, epoch
        self._jobs: dict[str, JobRounds] = {}
        self._former: dict[str, JobRounds] = {}  # the jobs of the last leadership
        self._tasks: set[asyncio.Task[None]] = set()
        self._environment = Environment(
            documents, clock, epoch, changed, self._is_current, DocumentReader(), self._start
        )

    def of(self, ref: JobRef) -> JobRounds:
        """The rounds of the job in the present leadership. Raises NotLeading.

        Call it anew after each wait: the leadership, and with it the object, may have changed.
        """
        epoch = self._epoch()
        job = self._jobs.get(ref.uid)
        if job is not None and job.epoch != epoch:
            self.forget_all()
            job = None
        return job or self._begin(ref, epoch)

    def withdraw_pod(self, job_uid: str, worker: Worker) -> None:
        """The pod is dead, or its node is lost: withdraw its agents now, before their leases expire."""
        if (former := self._former.get(job_uid)) is not None:
            former.presences.withdraw_pod(worker)
        job = self._jobs.get(job_uid)
        if job is None or not job.presences.withdraw_pod(worker):
            return
        extra = {"job": f"{job.ref.namespace}/{job.ref.name}", "worker": worker.index}
        log.info("agents of a dead pod are withdrawn", extra={**extra, "incarnation": worker.incarnation})
        job.after_presence()

    def answers(self, ref: JobRef, pod_uid: str) -> bool:
        """Whether an agent of this pod answers this leader."""
        try:
            return self.of(ref).answers(pod_uid)
        except NotLeading:
            return False

    def view(self, ref: JobRef, *, is_new: bool = False) -> RoundView | None:
        """The job's round, for a plan. None: not known yet; then it is read, and `changed` is called.

        `is_new`: the job has neither a status nor pods, so no document was written for it, and none is looked for."""
        try:
            return self.of(ref).view(is_new=is_new)
        except NotLeading:
            return None

    def write_failure(self, ref: JobRef) -> WriteFailure:
        """Why the job's ConfigMap cannot be written, if a person has to change something."""
        job = self._jobs.get(ref.uid)
        return WriteFailure() if job is None else job.write_failure

    def forget(self, job_uid: str) -> None:
        """The job is gone."""
        self._former.pop(job_uid, None)
        job = self._jobs.pop(job_uid, None)
        if job is not None:
            job.stop()

    def forget_all(self) -> None:
        """The leadership changed: this memory may be out of date, and all waiting calls must read again."""
        try:
            epoch = self._epoch()
        except NotLeading:
            epoch = -1
        old = {uid: job for uid, job in self._jobs.items() if job.epoch != epoch}
        if old:
            self._former = old
        for uid, job in old.items():
            del self._jobs[uid]
            job.stop()

    @property
    def watching(self) -> int:
        """How many calls of `watch` wait."""
        return sum(len(job.watches) for job in self._jobs.values())

    def _begin(self, ref: JobRef, epoch: int) -> JobRounds:
        now = self._clock.monotonic()
        # Another leader's count of expirations is not known here: every epoch counts in a range of its own.
        job = JobRounds(ref, epoch, Presences(epoch << 32, now), self._environment)
        self._jobs[ref.uid] = job
        former = self._former.pop(ref.uid, None)
        if former is not None and former.epoch + 1 == epoch:
            former.presences.resume(epoch << 32, now)
            job.presences, job.was_read = former.presences, former.was_read
            job.after_presence()
            job.schedule_batch()
        return job

    def _is_current(self, job: JobRounds) -> bool:
        """Whether this object is still in use: its job exists, and the leadership is the same."""
        return self._jobs.get(job.ref.uid) is job

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the round store failed", exc_info=error)
