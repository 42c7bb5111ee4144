"""The round store in the operator: one document a job, changed by compare-and-swap, watched, and who is present.

The document is durable (`round_documents`), presence and watches are this leader's memory. What a document means is the
agents' business (`everstep.membership.machine`), but for its round: its number is given here, by publication, so that
no two memberships ever have the same one, whoever believes to lead. And agents that ask for it have their wishes
written here, many in one swap, by the same machine. Invariants: a round's number only grows; its members never change;
a closed job stays closed; a refused call changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace

from everstep.contract.document import Document, DocumentInvalid, Sizes, decode_wish, encode
from everstep.contract.rounds import MAX_TTL, MAX_WAIT, MIN_TTL
from everstep_operator.plan.snapshot import RoundView
from everstep_operator.rounds.document_reader import DocumentReader
from everstep_operator.rounds.documents import JobRef, RoundDocuments, RoundsRefused, RoundsUnavailable, StoredDocument
from everstep_operator.rounds.memory import Memory, RememberedJob
from everstep_operator.rounds.presence import Worker
from everstep_operator.rounds.rules import (
    corrected,
    renumbered,
    require_lawful,
    round_view,
    urgency,
    with_sizes,
    with_wishes,
)
from everstep_operator.rounds.watches import Urgency
from everstep_operator.runtime.clock import Clock
from everstep_operator.runtime.errors import NotLeading

log = logging.getLogger("everstep.rounds")

API_TIMEOUT = 10.0  # seconds, for what one call asks of the API server
MAX_CACHE_SECONDS = 5.0  # a read asks the API server again after this time: somebody may have edited the ConfigMap
# With more agents present than this, only one at a time is told who is present, because each that is told will write.
MAX_UNCOORDINATED_AGENTS = 32
WRITER_SECONDS = 0.25  # for how long that one agent is the only one, unless it has written before
# Join requests are gathered for this time before they are written in one swap. The part for each byte of the document
# is twenty times what it takes to find the requests that are not in the document yet.
BATCH_SECONDS, BATCH_SECONDS_PER_AGENT, BATCH_SECONDS_PER_BYTE = 0.02, 2.5e-4, 7e-7
MAX_WRITE_ATTEMPTS = 5  # for one batch of join requests
# An agent whose join request is not written after this time writes it itself.
WRITE_GRACE_SECONDS, WRITE_GRACE_SECONDS_PER_AGENT = 1.0, 2e-3


@dataclass(frozen=True, slots=True)
class Agent:
    """Who calls: a pod of a job."""

    job: JobRef
    worker: Worker


@dataclass(frozen=True, slots=True)
class VersionedDocument:
    """What the store holds; see `everstep.contract.rounds`."""

    document: str | None
    version: int
    expirations: int


class RoundStore:
    """For one replica, in one event loop. `epoch` is that of its leadership and raises when it does not lead."""

    def __init__(
        self,
        documents: RoundDocuments,
        *,
        clock: Clock,
        epoch: Callable[[], int],
        changed: Callable[[JobRef], None] = lambda _: None,
    ) -> None:
        """`changed` is told when a job's view may be another."""
        self._documents, self._clock, self._epoch, self._changed = documents, clock, epoch, changed
        self._reader = DocumentReader()
        self._memory = Memory(clock, epoch, self._resumed)
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what agents call

    async def read(self, agent: Agent, known: int) -> VersionedDocument:
        """The newest document. `known` is the newest version that the agent has seen, here or at another leader."""
        job = self._memory.of(agent.job)
        await self._loaded(job, known, MAX_CACHE_SECONDS)
        return self._sight(job)

    async def watch(self, agent: Agent, known: int, expirations: int, wait: float) -> VersionedDocument | None:
        """As soon as version or expirations differ from these; None if they do not within `wait` seconds.

        Where only more agents wait for a round, it is told when all are told: an agent that was told while others came
        has an old version when it asks again, and would be told of each of them.
        """
        job = self._memory.of(agent.job)
        await self._loaded(job, known)
        sight = self._sight(job)
        if sight.expirations != expirations or not job.urgent <= known <= sight.version:
            return sight
        if known != sight.version:
            asyncio.get_running_loop().call_soon(job.watches.wake, Urgency.LATER)  # once this one waits
        await job.watches.wait(agent.worker.pod_uid, min(wait, MAX_WAIT))
        self._epoch()  # it may have been long: another may lead
        await self._loaded(job, known)
        sight = self._sight(job)
        return None if (sight.version, sight.expirations) == (known, expirations) else sight

    def is_late(self, agent: Agent, expected: int) -> bool:
        """Whether a swap would be refused whatever it writes: in a crowd most come too late."""
        kept = self._memory.of(agent.job).kept
        return kept is not None and expected < kept.version

    async def swap(self, agent: Agent, expected: int, data: bytes) -> int | None:
        """Write the document if the version is still `expected`: its new version; None: read again.

        A document that begins a round gets the number that is next by now. If that is not the one that it was written
        with, the agent is told to read again, and finds itself in that round. Raises DocumentInvalid, RoundsRefused,
        RoundsUnavailable (it may have been written).
        """
        if self.is_late(agent, expected):
            return None
        text, document = await self._reader.read(data, agent.job)
        job = self._memory.of(agent.job)
        async with job.lock:
            if job.kept is None or job.kept.version < expected:
                await self._load(job)
            if job.kept is None or job.kept.version != expected:
                return None
            require_lawful(job.document, document)
            asked, (text, document) = document, corrected(text, document, job.document)
            version = await self._put(job, expected, text, document)
            return version if document is asked else None

    async def _put(self, job: RememberedJob, expected: int, text: str, document: Document) -> int | None:
        """What `swap` gives. The lock is held."""
        job.spend(self._clock.monotonic())
        try:
            async with asyncio.timeout(API_TIMEOUT):
                kept, written = await self._write(job, expected, text, document)
        except BaseException as e:
            job.kept = None  # it may have been written
            if isinstance(e, TimeoutError):
                raise RoundsUnavailable(f"the API server did not answer in {API_TIMEOUT:g} s") from e
            raise
        if kept is None:
            await self._load(job)
            return None
        self._take(job, kept, written)
        return kept.version if written is document else None

    async def _write(
        self, job: RememberedJob, expected: int, text: str, document: Document
    ) -> tuple[StoredDocument | None, Document]:
        """What is kept now, and as which document: another than was asked for if its round has another number."""
        last = job.document.round if job.document is not None else 0
        if document.round > last:
            number = await self._documents.publish(job.ref, last)
            if number != document.round:
                log.info("round renumbered", extra={"job": _name(job.ref), "round": number, "asked": document.round})
                text, document = renumbered(text, number), replace(document, round=number)
        return await self._documents.store(job.ref, expected, text, job.presences.lease), document

    def announce(self, agent: Agent, name: str, value: bytes, ttl: float) -> None:
        """Make an agent present. Raises DocumentInvalid, PresenceRefused, PresenceFull."""
        wish = decode_wish(value)
        if wish.member.agent != name:
            raise DocumentInvalid(f"presence.member.agent: {wish.member.agent} is not {name}")
        if not MIN_TTL <= ttl <= MAX_TTL:
            raise DocumentInvalid(f"a lease of {ttl:g} s: {MIN_TTL:g} to {MAX_TTL:g} are expected")
        value.decode()  # JSON may be UTF-16, what is handed on is text
        job = self._memory.of(agent.job)
        job.presences.announce(wish, value, ttl, agent.worker, self._clock.monotonic())
        self._after_presence(job)

    def ask(self, agent: Agent, name: str) -> float:
        """Have the wish that an agent has just announced written, with those that come in the same moment, in one swap.

        Seconds after which the agent should do it by itself; 0: at once.
        """
        job = self._memory.of(agent.job)
        if job.document is not None and job.document.closed is not None:
            return 0.0  # it will find out why it cannot join
        job.presences.ask(name)
        self._write_soon(job)
        return WRITE_GRACE_SECONDS + len(job.presences) * WRITE_GRACE_SECONDS_PER_AGENT

    def renew(self, agent: Agent, name: str) -> bool:
        """False: it has lapsed. Raises PresenceRefused."""
        job = self._memory.of(agent.job)
        renewed = job.presences.renew(name, agent.worker, self._clock.monotonic())
        self._after_presence(job)
        return renewed

    def withdraw(self, agent: Agent, name: str) -> None:
        """Raises PresenceRefused."""
        job = self._memory.of(agent.job)
        job.presences.withdraw(name, agent.worker)
        self._after_presence(job)

    async def present(self, agent: Agent) -> bytes:
        """JSON: what each present agent says, by its name."""
        job = self._memory.of(agent.job)
        await self._loaded(job, 0)  # else nobody would be awaited
        now = self._clock.monotonic()
        job.presences.expire(now)
        # Who asks this is about to write. In a crowd the first one writes for all; it costs the others much to be late.
        version = job.kept.version if job.kept is not None else 0
        if (
            len(job.presences) > MAX_UNCOORDINATED_AGENTS
            and job.writer[:2] != (version, agent.worker.pod_uid)
            and (job.writer[0] == version and now < job.writer[2] + WRITER_SECONDS)
        ):
            raise RoundsUnavailable("another agent writes just now: look again")
        job.writer = (version, agent.worker.pod_uid, now)
        if job.answer[0] != job.presences.changes:
            found = json.dumps(job.presences.present(now), separators=(",", ":"))
            job.answer = (job.presences.changes, found.encode())
        self._after_presence(job)
        return job.answer[1]

    # --- what the operator calls

    def withdraw_pod(self, job_uid: str, worker: Worker) -> None:
        """The pod is dead, or its node is lost: its agents are told of now, and not when their leases lapse."""
        if (job := self._memory.withdraw_pod(job_uid, worker)) is not None:
            log.info(
                "agents of a dead pod are withdrawn",
                extra={"job": _name(job.ref), "worker": worker.index, "incarnation": worker.incarnation},
            )
            self._after_presence(job)

    def view(self, ref: JobRef) -> RoundView | None:
        """The job's round, for a plan. None: not known yet; it is read, and `changed` told."""
        try:
            job = self._memory.of(ref)
        except NotLeading:
            return None
        if job.kept is None:
            if not job.lock.locked():
                self._start(self._look(job))
            return None if job.document is None else round_view(job.document)
        return RoundView(0) if job.document is None else round_view(job.document)

    async def set_sizes(self, ref: JobRef, sizes: Sizes) -> None:
        """Agents keep to these sizes from now on. Raises RoundsUnavailable, after which it may be so."""
        job = self._memory.of(ref)
        async with job.lock:
            await self._load(job)  # a plan may be old, and this is rare
            assert job.kept is not None
            changed = with_sizes(job.kept.document, job.document, sizes)
            if changed is not None and await self._put(job, job.kept.version, *changed) is None:
                raise RoundsUnavailable("another operator changed the document at the same time")

    def forget(self, job_uid: str) -> None:
        """The job is gone."""
        self._memory.forget(job_uid)

    def forget_all(self) -> None:
        """The leadership changed: whoever waits here must look again."""
        self._memory.forget_all()

    @property
    def watching(self) -> int:
        """How many calls of `watch` wait."""
        return self._memory.watching

    # --- inside

    def _resumed(self, job: RememberedJob) -> None:
        self._after_presence(job)
        self._write_soon(job)

    def _write_soon(self, job: RememberedJob, attempt: int = 0) -> None:
        if job.writing is None:
            loop = asyncio.get_running_loop()
            size = len(job.kept.document or "") if job.kept is not None else 0
            pause = max(BATCH_SECONDS, len(job.presences) * BATCH_SECONDS_PER_AGENT, size * BATCH_SECONDS_PER_BYTE)
            due = max(loop.time() + BATCH_SECONDS * 2**attempt, job.written_at + pause)
            job.writing = loop.call_at(due, lambda: self._start(self._write_wishes(job, attempt)))

    async def _write_wishes(self, job: RememberedJob, attempt: int) -> None:
        """Who is not written is tried again, or writes by itself after its grace."""
        job.writing, job.written_at = None, asyncio.get_running_loop().time()
        try:
            await self._loaded(job, 0)
            async with job.lock:
                self._epoch()
                if job.kept is None:
                    await self._load(job)
                if job.kept is None or not self._memory.remembers(job):
                    return
                wishes = job.presences.wishes(self._clock.monotonic())
                document = with_wishes(job.kept.document, job.document, wishes, job.presences.asking)
                if document is None:
                    return
                if await self._put(job, job.kept.version, encode(document).decode(), document) is not None:
                    return
        except NotLeading:
            return
        except (RoundsUnavailable, RoundsRefused, DocumentInvalid) as e:
            log.info("wishes are not written", extra={"job": _name(job.ref), "reason": str(e)})
        if attempt < MAX_WRITE_ATTEMPTS and self._memory.remembers(job):
            self._write_soon(job, attempt + 1)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the round store failed", exc_info=error)

    async def _look(self, job: RememberedJob) -> None:
        try:
            await self._loaded(job, 0)
            self._changed(job.ref)
        except RoundsUnavailable as e:
            log.warning("a round is not known", extra={"job": _name(job.ref), "reason": str(e)})

    async def _loaded(self, job: RememberedJob, known: int, fresh: float = float("inf")) -> None:
        """See to it that something is known, not older than `known` nor than `fresh` seconds."""

        def is_old() -> bool:
            return job.kept is None or job.kept.version < known or self._clock.monotonic() - job.read_at >= fresh

        if is_old():
            async with job.lock:
                if is_old():
                    await self._load(job)

    async def _load(self, job: RememberedJob) -> None:
        """What the API server holds. The lock is held."""
        try:
            async with asyncio.timeout(API_TIMEOUT):
                kept = await self._documents.load(job.ref)
            found = None if kept.document is None else await self._reader.read(kept.document.encode(), job.ref)
        except TimeoutError as e:
            raise RoundsUnavailable(f"the API server did not answer in {API_TIMEOUT:g} s") from e
        except DocumentInvalid as e:
            raise RoundsUnavailable(f"the job's ConfigMap holds no document ({e}); delete it to begin anew") from e
        self._take(job, kept, None if found is None else found[1])

    def _take(self, job: RememberedJob, kept: StoredDocument, document: Document | None) -> None:
        """`kept` is what is known now, and `document` what it says."""
        before, changed = job.document, job.kept is None or job.kept.version != kept.version
        job.kept, job.document, job.read_at = kept, document, self._clock.monotonic()
        if not job.read:
            job.read = True
            job.presences.await_members(document, kept.lease)
            self._after_presence(job)
        if changed:
            job.presences.settle(document)
            if (how := urgency(before, document)) is not Urgency.LATER:
                job.urgent = kept.version
            job.watches.wake(how)
        if _news(before) != _news(document):
            if document is not None and document.round and (before is None or before.round != document.round):
                extra = {"job": _name(job.ref), "round": document.round, "agents": len(document.members)}
                log.info("round", extra=extra)
            self._changed(job.ref)

    def _sight(self, job: RememberedJob) -> VersionedDocument:
        if job.kept is None:
            raise RoundsUnavailable("a write is under way")
        if job.presences.expire(self._clock.monotonic()):
            self._after_presence(job)
        return VersionedDocument(job.kept.document, job.kept.version, job.presences.expirations)

    def _after_presence(self, job: RememberedJob) -> None:
        """Wake who waits if a presence ended, and see to it that the next end is noticed."""
        job.watches.wake_if_new(job.presences.expirations)
        now, earliest = self._clock.monotonic(), job.presences.earliest
        if job.timer is not None:
            if job.timer.when() <= asyncio.get_running_loop().time() + max(0.0, earliest - now) + 1e-3:
                return
            job.timer.cancel()
        job.timer = None
        if earliest != float("inf"):
            # Not much more often than that: with a clock that stands still this would spin.
            job.timer = asyncio.get_running_loop().call_later(max(0.01, earliest - now), self._expire, job)

    def _expire(self, job: RememberedJob) -> None:
        job.timer = None
        if self._memory.remembers(job):
            job.presences.expire(self._clock.monotonic())
            self._after_presence(job)


def _news(document: Document | None) -> object:
    return None if document is None else round_view(document)


def _name(job: JobRef) -> str:
    return f"{job.namespace}/{job.name}"
