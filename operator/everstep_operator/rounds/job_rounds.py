"""One job's rounds in this leader's memory: its document, the agents that are present, and the calls that wait.

The document is durable (`documents`); presence and watches are only in this leader's memory. The agents decide on the
content of a document (`everstep.membership`), with two exceptions. A round's number is assigned here, by publication:
so no two memberships ever have the same number, whichever replica believes that it leads. And join requests of agents
that ask for it are written here, many in one swap, by the same pure machine. Invariants: a round's number only grows;
its members never change; for agents a closed job stays closed; a refused call changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace

from everstep.contract.document import Document, DocumentInvalid, Sizes, decode_join_request, encode
from everstep.contract.rounds import MAX_TTL, MAX_WAIT, MIN_TTL
from everstep_operator.round_view import RoundView
from everstep_operator.rounds.departures import Departures
from everstep_operator.rounds.document_reader import DocumentReader
from everstep_operator.rounds.documents import (
    JobRef,
    NameTaken,
    RoundDocuments,
    RoundsRefused,
    RoundsUnavailable,
    StoredDocument,
    WriteFailure,
    WriteRefused,
)
from everstep_operator.rounds.presence import Presences, Worker
from everstep_operator.rounds.process_ends import ProcessEnds
from everstep_operator.rounds.rules import (
    begun_anew,
    corrected,
    renumbered,
    require_lawful,
    require_no_success,
    round_view,
    urgency,
    with_join_requests,
    with_sizes,
)
from everstep_operator.rounds.watches import Urgency, Watches
from everstep_operator.runtime.clock import Clock
from everstep_operator.runtime.errors import NotLeading

log = logging.getLogger("everstep.rounds")

API_TIMEOUT = 10.0  # seconds for one call's requests to the API server
MAX_CACHE_SECONDS = 5.0  # age at which the document is read again: a person may have edited the ConfigMap
# With more agents present than this, only one at a time gets the list of them, because each agent with it will write.
MAX_UNCOORDINATED_AGENTS = 32
WRITER_SECONDS = 0.25  # for how long that agent is the only one, unless it writes sooner
# Join requests are gathered for this time before they are written in one swap. The part for each byte of the document
# is twenty times what it takes to find the requests that are not in the document yet.
BATCH_SECONDS, BATCH_SECONDS_PER_AGENT, BATCH_SECONDS_PER_BYTE = 0.02, 2.5e-4, 7e-7
MAX_WRITE_ATTEMPTS = 5  # for one batch of join requests
# An agent whose join request is not written after this time writes it itself.
WRITE_GRACE_SECONDS, WRITE_GRACE_SECONDS_PER_AGENT = 1.0, 2e-3
WRITES_AT_ONCE, WRITES_PER_SECOND = 200.0, 20.0  # of the job's document


@dataclass(frozen=True, slots=True)
class VersionedDocument:
    """The store's document and its version; see `everstep.contract.rounds`."""

    document: str | None
    version: int
    expirations: int


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment that all jobs of one replica share.

    `epoch` gives the epoch of the replica's leadership, or raises NotLeading. `changed` is called when a job's view may
    have changed. `is_current`: whether the store still uses this object, and not another one for the same job.
    """

    documents: RoundDocuments
    clock: Clock
    epoch: Callable[[], int]
    changed: Callable[[JobRef], None]
    is_current: Callable[[JobRounds], bool]
    reader: DocumentReader
    start: Callable[[Coroutine[None, None, None]], None]


class JobRounds:
    """One job's rounds during one leadership. The lock is held while the document is read or written."""

    def __init__(self, ref: JobRef, epoch: int, presences: Presences, environment: Environment) -> None:
        self.ref, self.epoch, self.presences, self.watches = ref, epoch, presences, Watches()
        self.write_failure = WriteFailure()
        self.was_read = False  # whether the document was read in this leadership or the one before
        self._env = environment
        self._lock = asyncio.Lock()
        self._stored: StoredDocument | None = None  # None: not known
        self._document: Document | None = None
        self._urgent = 0  # the newest version that watchers must learn at once or soon
        self._departures, self._process_ends = Departures(), ProcessEnds()
        self._read_at = 0.0
        self._writes_left, self._refilled_at = WRITES_AT_ONCE, self._now()
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._batch_timer: asyncio.TimerHandle | None = None
        self._batch_at = float("-inf")  # when the last batch of join requests was written
        self._writer: tuple[int, str, float] = (-1, "", 0.0)  # version, pod and time of the last answer to `present`
        self._answer: tuple[int, bytes] = (-1, b"")  # of `present`, at a number of changes

    # --- what agents call

    async def read(self, known: int) -> VersionedDocument:
        """The newest document. `known` is the newest version that the agent has seen, here or at another leader."""
        await self._loaded(known, MAX_CACHE_SECONDS)
        return self._versioned()

    async def watch(self, worker: Worker, known: int, expirations: int, wait: float) -> VersionedDocument | None:
        """The document as soon as version or expirations differ from these; None if they do not within `wait` seconds.

        A change that only adds waiting agents is reported to all watchers together. Otherwise an agent that learns of
        one newcomer would have an old version when it calls again, and would learn of each newcomer separately.
        """
        await self._loaded(known)
        seen = self._versioned()
        if seen.expirations != expirations or not self._urgent <= known <= seen.version:
            return seen
        if known != seen.version:
            asyncio.get_running_loop().call_soon(self.watches.wake, Urgency.LATER)  # once this one waits
        await self.watches.wait(worker.pod_uid, min(wait, MAX_WAIT))
        self._env.epoch()  # the wait may have been long, and another replica may lead now
        await self._loaded(known)
        seen = self._versioned()
        return None if (seen.version, seen.expirations) == (known, expirations) else seen

    def is_late(self, expected: int) -> bool:
        """Whether a swap would be refused whatever it writes: among many agents, most come too late."""
        return self._stored is not None and expected < self._stored.version

    async def swap(self, expected: int, data: bytes, *, stop_requested: bool = False) -> int | None:
        """Write the document if the version is still `expected`. Returns its new version; None: the agent must read
        again. `stop_requested`: the processes of the agent may end because of that, and not by themselves.

        A document that begins a round gets the next free number. If the agent has written another one, it must read
        again, and finds itself in that round. Raises DocumentInvalid, RoundsRefused, NotLeading, RoundsUnavailable
        (the document may have been written).
        """
        if self.is_late(expected):
            return None
        text, document = await self._env.reader.read(data, self.ref)
        self._env.epoch()  # a large document is read in many turns of the event loop: another replica may lead now
        async with self._lock:
            if not self._env.is_current(self):
                raise RoundsUnavailable("the leadership has changed: send it again")
            if self._stored is None or self._stored.version < expected:
                await self._load()
            if self._stored is None or self._stored.version != expected:
                return None
            require_lawful(self._document, document)
            if stop_requested:
                require_no_success(self._document, document)
            proposed, (text, document) = document, corrected(text, document, self._document)
            version = await self._put(expected, text, document)
            return version if document is proposed else None

    def announce(self, worker: Worker, name: str, value: bytes, ttl: float) -> None:
        """Make an agent present. Raises DocumentInvalid, PresenceRefused, PresenceFull."""
        join_request = decode_join_request(value)
        if join_request.member.agent != name:
            raise DocumentInvalid(f"presence.member.agent: {join_request.member.agent} is not {name}")
        if not MIN_TTL <= ttl <= MAX_TTL:
            raise DocumentInvalid(f"a lease of {ttl:g} s: {MIN_TTL:g} to {MAX_TTL:g} are expected")
        value.decode()  # JSON may be UTF-16; other agents get text
        self.presences.announce(join_request, value, ttl, worker, self._now())
        self.after_presence()

    def request_write(self, name: str) -> float:
        """Write the join request that an agent has just announced, in one swap with others of the same moment.

        Returns the seconds after which the agent should write it by itself; 0: at once.
        """
        if self._document is not None and self._document.closed is not None:
            return 0.0  # the agent reads in the document why it cannot join
        self.presences.wait_for_round(name)
        self.schedule_batch()
        return WRITE_GRACE_SECONDS + len(self.presences) * WRITE_GRACE_SECONDS_PER_AGENT

    def renew(self, worker: Worker, name: str) -> bool:
        """False: the presence has expired. Raises PresenceRefused."""
        renewed = self.presences.renew(name, worker, self._now())
        self.after_presence()
        return renewed

    def withdraw(self, worker: Worker, name: str) -> None:
        """Raises PresenceRefused."""
        self.presences.withdraw(name, worker)
        self.after_presence()

    async def present(self, worker: Worker) -> bytes:
        """JSON: the announcement of each present agent, by its name."""
        await self._loaded(0)  # the document names the agents that are awaited
        now = self._now()
        self.presences.expire(now)
        # An agent that reads this is about to write. Among many agents, the first one writes for all.
        version = self._stored.version if self._stored is not None else 0
        if (
            len(self.presences) > MAX_UNCOORDINATED_AGENTS
            and self._writer[:2] != (version, worker.pod_uid)
            and (self._writer[0] == version and now < self._writer[2] + WRITER_SECONDS)
        ):
            raise RoundsUnavailable("another agent writes just now: look again")
        self._writer = (version, worker.pod_uid, now)
        if self._answer[0] != self.presences.changes:
            encoded = json.dumps(self.presences.present(now), separators=(",", ":"))
            self._answer = (self.presences.changes, encoded.encode())
        self.after_presence()
        return self._answer[1]

    # --- what the operator calls

    def answers(self, pod_uid: str) -> bool:
        return self.presences.answers(pod_uid, self._now())

    def view(self, *, is_new: bool = False) -> RoundView | None:
        """See `RoundRegistry.view`. If a new job has a document nevertheless, the next write or agent's call reads
        it."""
        if is_new and self._stored is None and not self.was_read and not self._lock.locked():
            self._stored = StoredDocument()
        if self._stored is None and not self._lock.locked():
            self._env.start(self._load_in_background())
        if self._document is None:
            return None if self._stored is None else RoundView(0)
        return self._process_ends.added_to(self._departures.added_to(round_view(self._document)))

    async def set_sizes(self, sizes: Sizes, surge: int = 0) -> None:
        """Set the sizes for the job's agents, and announce `surge` others. Raises RoundsUnavailable, after which they
        may be set or not."""
        await self._change(lambda text, document: with_sizes(text, document, sizes, surge))

    async def begin_anew(self, sizes: Sizes, after: int) -> None:
        """Begin the document anew that was closed after round `after`: all agents that knew it have ended. Raises as
        `set_sizes`."""
        await self._change(lambda _, document: begun_anew(document, sizes, after))

    async def _change(self, change: Callable[[str | None, Document | None], tuple[str, Document] | None]) -> None:
        async with self._lock:
            if self._stored is None:
                await self._load()
            for _ in range(2):  # the known document may be old: then the write fails, and reads it again
                assert self._stored is not None
                changed = change(self._stored.document, self._document)
                if changed is None or await self._put(self._stored.version, *changed) is not None:
                    return
            raise RoundsUnavailable("another operator changed the document at the same time")

    def stop(self) -> None:
        """End every timer, and wake all waiting calls, so that they find the newer object."""
        for timer in filter(None, (self._expiry_timer, self._batch_timer)):
            timer.cancel()
        self.watches.wake(Urgency.NOW)

    # --- the document

    async def _loaded(self, known: int, max_age: float = float("inf")) -> None:
        """Return when a document is known that is neither older than `known` nor than `max_age` seconds."""

        def is_old() -> bool:
            stored = self._stored if self.was_read else None  # the empty document of a new job was only assumed
            return stored is None or stored.version < known or self._now() - self._read_at >= max_age

        if is_old():
            async with self._lock:
                if is_old():
                    await self._load()

    async def _load_in_background(self) -> None:
        try:
            await self._loaded(0)
            self._env.changed(self.ref)
        except RoundsUnavailable as e:
            log.warning("a round is not known", extra={"job": self._name, "reason": str(e)})
            self._set_write_failure(
                replace(self.write_failure, name_taken=str(e) if isinstance(e, NameTaken) else None)
            )

    def _set_write_failure(self, failure: WriteFailure) -> None:
        if failure != self.write_failure:
            self.write_failure = failure
            self._env.changed(self.ref)

    async def _load(self) -> None:
        """Read the document from the API server. The lock is held."""
        try:
            async with asyncio.timeout(API_TIMEOUT):
                stored = await self._env.documents.load(self.ref)
            text = stored.document
            decoded = None if text is None else await self._env.reader.read(text.encode(), self.ref)
        except NameTaken as e:
            self._set_write_failure(replace(self.write_failure, name_taken=str(e)))
            raise
        except TimeoutError as e:
            raise RoundsUnavailable(f"the API server did not answer in {API_TIMEOUT:g} s") from e
        except DocumentInvalid as e:
            raise RoundsUnavailable(f"the job's ConfigMap holds no document ({e}); delete it to begin anew") from e
        self._set_write_failure(replace(self.write_failure, name_taken=None))
        self._adopt(stored, None if decoded is None else decoded[1])

    async def _put(self, expected: int, text: str, document: Document) -> int | None:
        """Write the document. Returns its version; None if the store has another, or if its round got another number.
        The lock is held."""
        self._spend_write()
        try:
            async with asyncio.timeout(API_TIMEOUT):
                stored, written = await self._write(expected, text, document)
        except WriteRefused as e:
            # It was not written, so the known document stays. To read it again would announce a change: the next pass
            # would follow at once and write again.
            self._set_write_failure(replace(self.write_failure, refused=str(e)))
            raise
        except BaseException as e:
            self._stored = None  # it may have been written
            if isinstance(e, TimeoutError):
                raise RoundsUnavailable(f"the API server did not answer in {API_TIMEOUT:g} s") from e
            raise
        self._set_write_failure(replace(self.write_failure, refused=None))
        if stored is None:
            self._stored = None  # if it cannot be read now, the next call tries again
            await self._load()
            return None
        self._adopt(stored, written)
        return stored.version if written is document else None

    def _spend_write(self) -> None:
        """Count one write of the document. Raises RoundsUnavailable if there were too many."""
        now = self._now()
        self._writes_left = min(WRITES_AT_ONCE, self._writes_left + (now - self._refilled_at) * WRITES_PER_SECOND)
        self._refilled_at = now
        if self._writes_left < 1:
            raise RoundsUnavailable(f"the job's document is written more than {WRITES_PER_SECOND:g} times a second")
        self._writes_left -= 1

    async def _write(self, expected: int, text: str, document: Document) -> tuple[StoredDocument | None, Document]:
        """The stored document, and the document as written: it differs from `document` if its round got another
        number."""
        last = self._document.round if self._document is not None else 0
        if document.round > last:
            number = await self._env.documents.publish(self.ref, last)
            if number != document.round:
                log.info("round renumbered", extra={"job": self._name, "round": number, "proposed": document.round})
                text, document = renumbered(text, number), replace(document, round=number)
        return await self._env.documents.store(self.ref, expected, text, self.presences.lease), document

    def _adopt(self, stored: StoredDocument, document: Document | None) -> None:
        """Take `stored` as the newest state; `document` is its decoded form."""
        before, changed = self._document, self._stored is None or self._stored.version != stored.version
        self._stored, self._document, self._read_at = stored, document, self._now()
        at = self._env.clock.now()
        self._departures.see(before, document, at)
        self._process_ends.see(before, document, at)
        if not self.was_read:
            self.was_read = True
            self.presences.await_members(document, stored.lease)
            self.after_presence()
        if changed:
            self.presences.round_formed(document)
            if (how := urgency(before, document)) is not Urgency.LATER:
                self._urgent = stored.version
            self.watches.wake(how)
        if _view_of(before) != _view_of(document):
            if document is not None and document.round and (before is None or before.round != document.round):
                extra = {"job": self._name, "round": document.round, "agents": len(document.members)}
                log.info("round", extra=extra)
            self._env.changed(self.ref)

    def _versioned(self) -> VersionedDocument:
        if self._stored is None:
            raise RoundsUnavailable("a write is under way")
        if self.presences.expire(self._now()):
            self.after_presence()
        return VersionedDocument(self._stored.document, self._stored.version, self.presences.expirations)

    # --- join requests that are written together

    def schedule_batch(self, attempt: int = 0) -> None:
        """Write the join requests that are not in the document yet, with those of the next moment."""
        if self._batch_timer is None:
            loop = asyncio.get_running_loop()
            size = len(self._stored.document or "") if self._stored is not None else 0
            pause = max(BATCH_SECONDS, len(self.presences) * BATCH_SECONDS_PER_AGENT, size * BATCH_SECONDS_PER_BYTE)
            due = max(loop.time() + BATCH_SECONDS * 2**attempt, self._batch_at + pause)
            self._batch_timer = loop.call_at(due, lambda: self._env.start(self._write_batch(attempt)))

    async def _write_batch(self, attempt: int) -> None:
        """Write one batch. A request that is not written is tried again, or its agent writes it after its grace."""
        self._batch_timer, self._batch_at = None, asyncio.get_running_loop().time()
        try:
            await self._loaded(0)
            async with self._lock:
                self._env.epoch()
                if self._stored is None:
                    await self._load()
                if self._stored is None or not self._env.is_current(self):
                    return
                known, seen = self._stored, self.presences
                requests = seen.join_requests(self._now())
                document = with_join_requests(known.document, self._document, requests, seen.waiting)
                if document is None or await self._put(known.version, encode(document).decode(), document) is not None:
                    return
        except NotLeading:
            return
        except (RoundsUnavailable, RoundsRefused, DocumentInvalid) as e:
            log.info("join requests are not written", extra={"job": self._name, "reason": str(e)})
        if attempt < MAX_WRITE_ATTEMPTS and self._env.is_current(self):
            self.schedule_batch(attempt + 1)

    # --- presence

    def after_presence(self) -> None:
        """Wake watchers if a presence ended, and set the timer for the next end."""
        self.watches.wake_if_new(self.presences.expirations)
        now, earliest = self._now(), self.presences.earliest
        if self._expiry_timer is not None:
            if self._expiry_timer.when() <= asyncio.get_running_loop().time() + max(0.0, earliest - now) + 1e-3:
                return
            self._expiry_timer.cancel()
        self._expiry_timer = None
        if earliest != float("inf"):
            # At most a hundred times a second: if the clock stood still, this would spin.
            self._expiry_timer = asyncio.get_running_loop().call_later(max(0.01, earliest - now), self._expire)

    def _expire(self) -> None:
        self._expiry_timer = None
        try:
            self._env.epoch()
        except NotLeading:
            return  # nobody could renew at a process that stood still: with its next term each gets one more lease
        if self._env.is_current(self):
            self.presences.expire(self._now())
            self.after_presence()

    def _now(self) -> float:
        return self._env.clock.monotonic()

    @property
    def _name(self) -> str:
        return f"{self.ref.namespace}/{self.ref.name}"


def _view_of(document: Document | None) -> RoundView | None:
    return None if document is None else round_view(document)
