"""The round store in the operator: each job has one document, changed by compare-and-swap and watched, and presences.

`job` has the state of one job; this module has the jobs that this leader knows. Its memory is lost with the leadership,
and the next leader reads the documents and hears of the agents again. But a replica that leads again, with no other
leader in between, remembers which agents were present: if the Lease is lost for a moment, no waiting agent loses its
place. Invariant: an answer belongs to the present leadership.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from everstep.contract.document import Sizes
from everstep_operator.round_view import RoundView
from everstep_operator.rounds.document_reader import DocumentReader
from everstep_operator.rounds.documents import Hindered, JobRef, RoundDocuments
from everstep_operator.rounds.job_rounds import Environment, JobRounds, VersionedDocument
from everstep_operator.rounds.presence import Presences, Worker
from everstep_operator.runtime.clock import Clock
from everstep_operator.runtime.errors import NotLeading

log = logging.getLogger("everstep.rounds")


@dataclass(frozen=True, slots=True)
class Agent:
    """The caller: a pod of a job. `told_to_end`: whatever its processes do now is not their own doing."""

    job: JobRef
    worker: Worker
    told_to_end: bool = False


class RoundStore:
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
        self._clock, self._epoch, self._reader = clock, epoch, DocumentReader()
        self._jobs: dict[str, JobRounds] = {}
        self._left: dict[str, JobRounds] = {}  # the jobs of the last leadership
        self._tasks: set[asyncio.Task[None]] = set()
        self._environment = Environment(documents, clock, epoch, changed, self._is_current, self._reader, self._start)

    # --- what agents call

    async def read(self, agent: Agent, known: int) -> VersionedDocument:
        """The newest document. `known` is the newest version that the agent has seen, here or at another leader."""
        return await self._of(agent.job).read(known)

    async def watch(self, agent: Agent, known: int, expirations: int, wait: float) -> VersionedDocument | None:
        """The document as soon as version or expirations differ from these; None if they do not within `wait` seconds.

        A change that only adds waiting agents is reported to all watchers together. Otherwise an agent that hears of
        one newcomer would have an old version when it asks again, and would hear of each newcomer separately.
        """
        return await self._of(agent.job).watch(agent.worker, known, expirations, wait)

    def is_late(self, agent: Agent, expected: int) -> bool:
        """Whether a swap would be refused whatever it writes: among many agents, most come too late."""
        return self._of(agent.job).is_late(expected)

    async def swap(self, agent: Agent, expected: int, data: bytes) -> int | None:
        """Write the document if the version is still `expected`. Returns its new version; None: the agent must read
        again.

        A document that begins a round gets the next free number. If the agent has written another one, it must read
        again, and finds itself in that round. Raises DocumentInvalid, RoundsRefused, RoundsUnavailable (the document
        may have been written).
        """
        if self.is_late(agent, expected):
            return None
        text, document = await self._reader.read(data, agent.job)
        return await self._of(agent.job).swap(expected, text, document, told_to_end=agent.told_to_end)

    def announce(self, agent: Agent, name: str, value: bytes, ttl: float) -> None:
        """Make an agent present. Raises DocumentInvalid, PresenceRefused, PresenceFull."""
        self._of(agent.job).announce(agent.worker, name, value, ttl)

    def ask(self, agent: Agent, name: str) -> float:
        """Write the join request that an agent has just announced, in one swap with others of the same moment.

        Returns the seconds after which the agent should write it by itself; 0: at once.
        """
        return self._of(agent.job).ask(name)

    def renew(self, agent: Agent, name: str) -> bool:
        """False: the presence has expired. Raises PresenceRefused."""
        return self._of(agent.job).renew(agent.worker, name)

    def withdraw(self, agent: Agent, name: str) -> None:
        """Raises PresenceRefused."""
        self._of(agent.job).withdraw(agent.worker, name)

    async def present(self, agent: Agent) -> bytes:
        """JSON: the announcement of each present agent, by its name."""
        return await self._of(agent.job).present(agent.worker)

    # --- what the operator calls

    def withdraw_pod(self, job_uid: str, worker: Worker) -> None:
        """The pod is dead, or its node is lost: withdraw its agents now, before their leases expire."""
        if (left := self._left.get(job_uid)) is not None:
            left.presences.withdraw_pod(worker)
        job = self._jobs.get(job_uid)
        if job is None or not job.presences.withdraw_pod(worker):
            return
        extra = {"job": f"{job.ref.namespace}/{job.ref.name}", "worker": worker.index}
        log.info("agents of a dead pod are withdrawn", extra={**extra, "incarnation": worker.incarnation})
        job.after_presence()

    def answers(self, ref: JobRef, pod_uid: str) -> bool:
        """Whether an agent of this pod answers this leader."""
        try:
            return self._of(ref).answers(pod_uid)
        except NotLeading:
            return False

    def view(self, ref: JobRef, *, is_new: bool = False) -> RoundView | None:
        """The job's round, for a plan. None: not known yet; then it is read, and `changed` is called.

        `is_new`: the job has neither a status nor pods, so no document was written for it, and none is looked for."""
        try:
            return self._of(ref).view(is_new=is_new)
        except NotLeading:
            return None

    def hindered(self, ref: JobRef) -> Hindered:
        """Why the job's ConfigMap cannot be written, if a person has to change something."""
        job = self._jobs.get(ref.uid)
        return Hindered() if job is None else job.hindered

    async def set_sizes(self, ref: JobRef, sizes: Sizes) -> None:
        """Set the sizes for the job's agents. Raises RoundsUnavailable, after which they may be set or not."""
        await self._of(ref).set_sizes(sizes)

    def forget(self, job_uid: str) -> None:
        """The job is gone."""
        self._left.pop(job_uid, None)
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
            self._left = old
        for uid, job in old.items():
            del self._jobs[uid]
            job.stop()

    @property
    def watching(self) -> int:
        """How many calls of `watch` wait."""
        return sum(len(job.watches) for job in self._jobs.values())

    # --- which jobs are known

    def _of(self, ref: JobRef) -> JobRounds:
        """The rounds of the job; made now if it was not known. Raises NotLeading."""
        epoch = self._epoch()
        job = self._jobs.get(ref.uid)
        if job is not None and job.epoch != epoch:
            self.forget_all()
            job = None
        return job or self._begin(ref, epoch)

    def _begin(self, ref: JobRef, epoch: int) -> JobRounds:
        now = self._clock.monotonic()
        # Another leader's count of expirations is not known here: every epoch counts in a range of its own.
        job = JobRounds(ref, epoch, Presences(epoch << 32, now), self._environment)
        self._jobs[ref.uid] = job
        left = self._left.pop(ref.uid, None)
        if left is not None and left.epoch + 1 == epoch:
            left.presences.resume(epoch << 32, now)
            job.presences, job.was_read = left.presences, left.was_read
            job.after_presence()
            job.write_soon()
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
