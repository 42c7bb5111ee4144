"""Reads and appends the commit log on a store, as the functions in `decisions` decide.

Knows records and names, not shards or torch. Invariant: it creates a record only where `log` said `Append`, and
believes only what it read back; it replaces one only by its compacted form. Every loop is bounded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, assert_never

from everstep.checkpoint.errors import CheckpointError, Fenced, FormatError, NoCommit, OwnerUnknown, SaveFailed
from everstep.checkpoint.format.complete import read_complete
from everstep.checkpoint.format.layout import (
    LOG,
    MAX_RECORD_NUMBER,
    OPENS,
    open_copy_name,
    open_copy_number,
    record_name,
    record_number,
)
from everstep.checkpoint.format.manifest import (
    NONE,
    CommitRecord,
    OpenRecord,
    Record,
    compacted,
    decode_record,
    encode_record,
)
from everstep.checkpoint.log import decisions
from everstep.checkpoint.log import decisions as log
from everstep.checkpoint.log.decisions import Again, Append, Claim, Done, Head, Refuse, Unknown, Unreadable
from everstep.storage import AlreadyExists, NotFound, ObjectStore, StorageError, StoreUnusable

# --- copies
# A copy of each open record beside the log: who owns the log is known although one object is damaged. An open record
# alone says which rounds and jobs may not take the log any more. So its writer puts a copy under a name of its own, and
# creates the record only then. Invariant: whatever record `n` holds, if it is an open record of a release that knows
# copies, a copy of it was written before it. A copy alone opens nothing: of two writers that raced for one number, both
# have written one. The loser takes its own away again, unless it dies; each open removes those of opens below the one
# before it.

logger = logging.getLogger("everstep.checkpoint")

# The writers that took a log in this process: one that finds itself overtaken can say that no other run did it.
_OF_THIS_PROCESS: Final = set[str]()
_BY_ITSELF: Final = (
    ". That was a newer Checkpointer of this process, which took the log by its restore(). To only read a commit, call "
    "everstep.load(url); to save beside this one, give the other Checkpointer a URL of its own"
)

_KIND_BYTES: Final = 256  # the kind is the third field of a record


class OpenCopies:
    """The copies below one store. Methods raise `StorageError`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def write(self, record: OpenRecord) -> None:
        """Write the copy of an open record that is not created yet."""
        self._store.put(open_copy_name(record.n, record.writer), encode_record(record))

    def remove(self, record: OpenRecord) -> None:
        """Remove the copy of an open record that was not created, because its number is another writer's."""
        self._store.delete(open_copy_name(record.n, record.writer))

    def sweep(self, own: OpenRecord) -> None:
        """Remove the copies of opens that no decision needs any more: of those below the one before `own`."""
        try:
            for info in self._store.list(OPENS):
                if (n := open_copy_number(info.name)) is not None and n < own.open:
                    self._store.delete(info.name)
        except StorageError as e:
            logger.debug("copies of older opens stay for the next open to remove: %s", e)

    def opened_by(self, n: int, writer: str) -> OpenRecord | None:
        """The open record `n` of this writer, from its copy."""
        name = open_copy_name(n, writer)
        try:
            record = decode_record(self._store.get(name), n, name)
        except (NotFound, FormatError):
            return None
        return record if isinstance(record, OpenRecord) and record.writer == writer else None

    def resolve(self, damaged: Unreadable, below: OpenRecord | None, claimant: str = "") -> OpenRecord | Unreadable:
        """`decisions.resolve` for a damaged record. `below` is the newest open under it. `claimant` is a writer whose
        own create of this record was refused."""
        names = [info.name for info in self._store.list(OPENS)]
        own = open_copy_name(damaged.n, claimant) if claimant else ""
        here = [name for name in names if open_copy_number(name) == damaged.n and name != own]
        known = below is not None and any(open_copy_number(name) == below.n for name in names)
        kind = self._kind(damaged.n)
        return decisions.resolve(damaged, [self._read(name, damaged.n) for name in here], kind=kind, known=known)

    def _read(self, name: str, n: int) -> OpenRecord | None:
        try:
            record = decode_record(self._store.get(name), n, name)
        except (NotFound, FormatError):
            return None
        return record if isinstance(record, OpenRecord) else None

    def _kind(self, n: int) -> str:
        """The kind in the bytes of a damaged record, or "". One flipped bit leaves most bytes as they were. Bytes with
        another number are another record's, so their kind does not count."""
        try:
            head = self._store.get(record_name(n), 0, _KIND_BYTES)
        except NotFound:
            return ""
        if b'"n":%d,' % n not in head:
            return ""
        return next((kind for kind in ("open", "commit") if b'"kind":"%s"' % kind.encode() in head), "")


# --- commitlog

MAX_CONFLICTS: Final = 1000  # as many writers may race for one number
IMPORT: Final = "import"  # instead of a rendezvous, in the open record of an imported commit
MAX_WALK: Final = 10_000  # records read in search of one


def now() -> str:
    """The time as records have it: RFC 3339, in whole seconds."""
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class CommitLog:
    """The log below one store. Methods raise `StorageError` beside what they name."""

    def __init__(self, store: ObjectStore, start: int = 0) -> None:
        self._store = store
        self._start = start
        self._copies = OpenCopies(store)

    def read(self, n: int) -> Record | Unreadable:
        """Record `n`, or why it cannot be read. Raises `UnsupportedVersion` for a newer format."""
        name = record_name(n)
        try:
            return read_complete(self._store, name, lambda data: decode_record(data, n, f"{self._store.url}/{name}"))
        except NotFound:
            return Unreadable(n, f"{name} is missing")
        except FormatError as e:
            return Unreadable(n, str(e))

    def head(self) -> Head:
        """The end of the log. A listing may be stale, so the numbers after its greatest are tried one by one."""
        last = self._listed() if self._store.capabilities.listable else self._probed()
        for _ in range(MAX_WALK):
            if self._store.size(record_name(last + 1)) is None:
                break
            last += 1
        damaged: list[Unreadable] = []  # above the newest record that can be read
        head = Head()
        for n in range(last, max(NONE, last - MAX_WALK), -1):
            record = self.read(n)
            if isinstance(record, Unreadable):
                damaged.append(record)
                continue
            head = self._head_at(record)
            break
        for record in reversed(damaged):
            head = log.advance(head, self._resolved(record, head))
        return replace(head, last=last)

    def _head_at(self, record: Record | Unreadable) -> Head:
        """The head of a log that ends with this record."""
        if not isinstance(record, CommitRecord):
            return log.advance(Head(), record)
        own = self.read(record.open)
        if isinstance(own, Unreadable):
            # The commit names the writer of that open record, so no other writer's copy is taken for it.
            own = self._copies.opened_by(record.open, record.writer) or own
        if isinstance(own, OpenRecord):
            return Head(record.n, own, record.n)
        return Head(record.n, self._open_below(record.open), record.n, record.open)

    def _resolved(self, record: Record | Unreadable, head: Head, claimant: str = "") -> Record | Unreadable:
        """The record after `head`; if it is damaged, what its copies say about it."""
        if not isinstance(record, Unreadable) or not self._store.capabilities.listable:
            return record
        return self._copies.resolve(record, head.open, claimant)

    def opened_after(self, n: int) -> tuple[int, int | None]:
        """The last record after record `n`, and the first one that is, or might be, another writer's open."""
        head = self._head_at(self.read(n)) if self._store.size(record_name(n + 1)) is not None else Head(n)
        for _ in range(MAX_WALK):
            if self._store.size(record_name(head.last + 1)) is None:
                return head.last, None
            record = self._resolved(self.read(head.last + 1), head)
            if isinstance(record, OpenRecord) or (isinstance(record, Unreadable) and record.opens):
                return head.last, record.n
            head = log.advance(head, record)
        return head.last, None

    def unbegun(self) -> Head:
        """The end of a log that no run has begun: it is empty, or an import was cut off before its commit. Raises
        `CheckpointError` if there is another record."""
        head = self.head()
        cut_off = head.open is not None and head.open.rendezvous == IMPORT and head.commit == NONE
        if head.last != NONE and not cut_off:
            raise CheckpointError(
                f"{self._store.url}: holds a log of {head.last + 1} records already; give an empty folder or prefix"
            )
        return head

    def begin(self, writer: str, draft: CommitRecord) -> CommitRecord:
        """Make `draft`, whose shards are written, the first commit of a log that no run has begun.

        Raises `CheckpointError` if one has, without taking the log from it.
        """
        head = self.unbegun()
        claim = Claim(writer, 0, "", draft.world_size, draft.at, rendezvous=IMPORT)
        decision = log.decide_open(head, claim)
        outcome = self._create(head, decision.record) if isinstance(decision, Append) else decision
        try:
            if not isinstance(outcome, Done):
                raise Fenced(f"record {head.last + 1} is another writer's")
            own = outcome.record
            assert isinstance(own, OpenRecord)
            return self.commit(Head(own.n, own, own.commit), own, draft)[1]
        except Fenced as e:
            raise CheckpointError(
                f"{self._store.url}: another writer has begun there meanwhile; give an empty folder or prefix ({e})"
            ) from e

    def _listed(self) -> int:
        numbers = (record_number(info.name) for info in self._store.list(LOG))
        return max((n for n in numbers if n is not None), default=NONE)

    def _probed(self) -> int:
        """The greatest record number in a store that cannot be listed: searched by doubling steps, then by halves. That
        takes about 2 log2 requests. The log is dense, and records stay when they are compacted (ADR 0019).

        Raises `NoCommit` if there is no record to begin from, `StoreUnusable` if every name seems to be there: the
        search would have no end.
        """
        if self._has(MAX_RECORD_NUMBER):
            raise StoreUnusable(
                f"{self._store.url}: the server answers for names that do not exist: {record_name(MAX_RECORD_NUMBER)}. "
                "Is it a login page, or a page in place of status 404? Give a URL that serves the files as they are"
            )
        low = self._start
        if not self._has(low):
            raise NoCommit(
                f"{self._store.url}: there is no record {low}, and this store cannot be listed. If there is a log, "
                "give start=, the number of any record that exists, or n=, the commit's own number"
            )
        step = 1
        while self._has(low + step):
            low, step = low + step, step * 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._has(middle) else (low, middle)
        return low

    def _has(self, n: int) -> bool:
        return n <= MAX_RECORD_NUMBER and self._store.size(record_name(n)) is not None

    def open(self, claim: Claim) -> OpenRecord:
        """Take the log. Raises `Fenced` if it belongs to a newer round or job."""
        head = self.head()
        for _ in range(MAX_CONFLICTS):
            match log.decide_open(head, claim):
                case Refuse(reason):
                    raise Fenced(f"{self._store.url}: {reason}")
                case Unknown(reason):
                    raise OwnerUnknown(
                        f"{self._store.url}: {reason}. Nobody may take this log. If no other run is alive, copy the "
                        "newest commit with `everstep ckpt restore` to an empty URL, and start the run there"
                    )
                case Append(record):
                    match self._create(head, record):
                        case Done(done):
                            assert isinstance(done, OpenRecord)
                            _OF_THIS_PROCESS.add(done.writer)
                            self._copies.sweep(done)
                            return done
                        case Refuse(reason):
                            raise Fenced(f"{self._store.url}: {reason}")
                        case Again(moved):
                            head = moved
        raise CheckpointError(f"{self._store.url}: {MAX_CONFLICTS} writers in a row were faster to open the log")

    def commit(self, head: Head, own: OpenRecord, draft: CommitRecord) -> tuple[Head, CommitRecord]:
        """Append `draft`, whose shards are written. `head` is what the writer knew last.

        Raises `Fenced` if another writer has opened the log since, `SaveFailed` if that is unknown, and `FormatError`
        for a record that nobody could read: it is decoded before it is created.
        """
        self.check_own(own)
        for _ in range(MAX_CONFLICTS):
            decision = log.decide_commit(head, own, draft)
            match decision:
                case Refuse():
                    raise self._overtaken(decision)
                case Unknown(reason):
                    raise SaveFailed(f"{self._store.url}: {reason}")
                case Append(record):
                    match outcome := self._create(head, record):
                        case Done(done):
                            assert isinstance(done, CommitRecord)
                            return log.advance(head, done), done
                        case Refuse():
                            raise self._overtaken(outcome)
                        case Again(moved):
                            head = moved
                case _:
                    assert_never(decision)
        raise SaveFailed(f"{self._store.url}: {MAX_CONFLICTS} conflicts in a row at the end of the log")

    def overtaken(self, own: OpenRecord) -> Fenced | None:
        """The error if another writer has opened the log since `own`, and None also if that is unknown.

        Such a writer removes what this one was writing and the commits that it does not keep: what is missing then is
        no failure of the store and no damage.
        """
        try:
            by = self.opened_after(own.n)[1]
            record = None if by is None else self.read(by)
        except StorageError:
            return None
        if isinstance(record, OpenRecord):
            return self._overtaken(log.fenced_by(record))
        return None if by is None else Fenced(f"{self._store.url}: record {by} is, or might be, a newer run's")

    def _overtaken(self, by: Refuse) -> Fenced:
        return Fenced(f"{self._store.url}: {by.reason}{_BY_ITSELF if by.writer in _OF_THIS_PROCESS else ''}")

    def check_own(self, own: OpenRecord) -> None:
        """See that this is still the log that `own` has opened: a folder may be emptied, replaced, or unmounted.

        Raises `SaveFailed` if the record is gone, and `Fenced` if the log is another one. A damaged record is there.
        """
        name = record_name(own.n)
        where = f"{self._store.url}: {name}, with which this run has opened the log,"
        try:
            record = read_complete(self._store, name, lambda data: decode_record(data, own.n, name))
        except NotFound as e:
            raise SaveFailed(
                f"{where} is gone: the place was deleted, emptied or replaced, or its mount has fallen away. Nothing "
                "is committed there. Bring it back, or end this run and start it again"
            ) from e
        except FormatError:
            return
        if record.writer != own.writer:
            raise Fenced(f"{where} is now writer {record.writer}'s: the place was emptied, and a newer run has begun")

    def commits(self, below: int) -> Iterator[CommitRecord | Unreadable]:
        """The commits below record `below`, newest first, with the damaged records that were passed on the way."""
        n = below - 1
        for _ in range(MAX_WALK):
            if n < 0:
                return
            record = self.read(n)
            match record:
                case CommitRecord():
                    yield record
                    n = record.commit
                case OpenRecord():
                    n = record.commit
                case Unreadable():
                    yield record
                    n -= 1
                case _:
                    assert_never(record)

    def compact(self, record: CommitRecord) -> None:
        """Replace the record of a commit whose shards are deleted by a short one. Repeating it is harmless."""
        self._store.put(record_name(record.n), encode_record(compacted(record)))

    def _create(self, head: Head, record: Record) -> Done | Refuse | Again:
        name, data = record_name(record.n), encode_record(record)
        decode_record(
            data, record.n, f"{self._store.url}/{name}"
        )  # raises: a record that nobody can read must not exist
        if isinstance(record, OpenRecord):
            self._copies.write(record)
        try:
            self._store.create(name, data)
        except AlreadyExists:
            there = self.read(record.n)
            outcome = log.after_conflict(head, record, self._resolved(there, head, record.writer))
            # A damaged record may be this one, created by a request whose answer was lost: then its copy has to stay.
            if isinstance(record, OpenRecord) and not isinstance(there, Unreadable) and not isinstance(outcome, Done):
                self._copies.remove(record)
            return outcome
        return Done(record, "created")

    def _open_below(self, n: int) -> OpenRecord | None:
        """The nearest open record below record `n` that can be read."""
        for at in range(n - 1, max(NONE, n - MAX_WALK), -1):
            record = self.read(at)
            if isinstance(record, OpenRecord):
                return record
        return None
