"""A copy of each open record beside the log: who owns the log is known although one object is damaged.

An open record alone says which rounds and jobs may not take the log any more. So its writer puts a copy under a name of
its own, and creates the record only then. Invariant: whatever record `n` holds, if it is an open record of a release
that knows copies, a copy of it was written before it. A copy alone opens nothing: of two writers that raced for one
number, both have written one. The loser takes its own away again, unless it dies; each open removes those of opens
below the one before it.
"""

from __future__ import annotations

import logging
from typing import Final

from everstep.checkpoint.errors import FormatError
from everstep.checkpoint.format.layout import OPENS, open_copy_name, open_copy_number, record_name
from everstep.checkpoint.format.manifest import OpenRecord, decode_record, encode_record
from everstep.checkpoint.log import decisions
from everstep.checkpoint.log.decisions import Unreadable
from everstep.storage import NotFound, ObjectStore, StorageError

log = logging.getLogger("everstep.checkpoint")

_KIND_BYTES: Final = 256  # the kind is the third field of a record


class OpenCopies:
    """The copies below one store. Methods raise `StorageError`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def write(self, record: OpenRecord) -> None:
        """Before the record is created."""
        self._store.put(open_copy_name(record.n, record.writer), encode_record(record))

    def remove(self, record: OpenRecord) -> None:
        """Its create was refused: the number is another writer's."""
        self._store.delete(open_copy_name(record.n, record.writer))

    def sweep(self, own: OpenRecord) -> None:
        """Remove the copies of opens that no decision needs any more: of those below the one before `own`."""
        try:
            for info in self._store.list(OPENS):
                if (n := open_copy_number(info.name)) is not None and n < own.open:
                    self._store.delete(info.name)
        except StorageError as e:
            log.debug("copies of older opens stay for the next open to remove: %s", e)

    def opened_by(self, n: int, writer: str) -> OpenRecord | None:
        """The open record `n` of this writer, from its copy."""
        name = open_copy_name(n, writer)
        try:
            record = decode_record(self._store.get(name), n, name)
        except (NotFound, FormatError):
            return None
        return record if isinstance(record, OpenRecord) and record.writer == writer else None

    def resolve(self, found: Unreadable, below: OpenRecord | None, claimant: str = "") -> OpenRecord | Unreadable:
        """`decisions.resolve` for a damaged record. `below` is the newest open under it. `claimant` is a writer whose
        own create of this record was refused."""
        names = [info.name for info in self._store.list(OPENS)]
        own = open_copy_name(found.n, claimant) if claimant else ""
        here = [name for name in names if open_copy_number(name) == found.n and name != own]
        known = below is not None and any(open_copy_number(name) == below.n for name in names)
        kind = self._kind(found.n)
        return decisions.resolve(found, [self._read(name, found.n) for name in here], kind=kind, known=known)

    def _read(self, name: str, n: int) -> OpenRecord | None:
        try:
            record = decode_record(self._store.get(name), n, name)
        except (NotFound, FormatError):
            return None
        return record if isinstance(record, OpenRecord) else None

    def _kind(self, n: int) -> str:
        """What a damaged record says that it is: one flipped bit leaves most of it as it was. Bytes that name another
        number are another record's, and say nothing of this one."""
        try:
            head = self._store.get(record_name(n), 0, _KIND_BYTES)
        except NotFound:
            return ""
        if b'"n":%d,' % n not in head:
            return ""
        return next((kind for kind in ("open", "commit") if b'"kind":"%s"' % kind.encode() in head), "")
