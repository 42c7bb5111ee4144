"""Compacts the records of commits whose shards are deleted, after a clean-up.

Invariant: a record is replaced only by what `compaction.compacted` makes of it, and only when no shard of its commit is
left and nobody has pinned it: then no reader could have restored it. Whoever else compacts the same record writes the
same bytes, so nobody has to be kept out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from everstep.checkpoint.format.compaction import SMALL_BYTES, is_compacted
from everstep.checkpoint.format.layout import LOG, record_number
from everstep.checkpoint.format.manifest import CommitRecord
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.retention.pins import delete_save, is_held, saves_of
from everstep.storage import ObjectStore

A_PASS: Final = 8  # records: one is retired by each save; more of them catch up with what a crash left


class Compactor:
    """Knows which records of one log may have become history. Methods raise `StorageError`; calling again goes on."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._log = CommitLog(store)
        self._todo: dict[int, CommitRecord | None] = {}  # None: not read yet

    def retire(self, records: Iterable[CommitRecord]) -> None:
        """These commits are not among those to keep any more."""
        self._todo.update((record.n, record) for record in records)

    def again(self, numbers: Iterable[int]) -> None:
        """The commits of these records are not held any more; they are read again."""
        for n in numbers:
            self._todo.setdefault(n, None)

    def look(self, below: int) -> None:
        """Take up the records below `below`, the oldest commit to keep, that are too large to be compacted ones: a
        writer that died left them, or one of a release that did not compact."""
        for info in self._store.list(LOG):
            n = record_number(info.name)
            if n is not None and n < below and info.size > SMALL_BYTES:
                self._todo.setdefault(n, None)

    def run(
        self, there: Collection[str], most: int = A_PASS, *, may: Callable[[], bool] = lambda: True
    ) -> int:  # fmt: skip
        """Compact at most `most` records, oldest first; how many were. `there` are the saves that have objects; `may`
        is asked before each record whether the caller still may."""
        done = 0
        for n in sorted(self._todo)[:most]:
            if not may():
                break
            record = self._todo[n] or self._log.read(n)
            if isinstance(record, CommitRecord) and not is_compacted(record):
                done += self._compact(record, there, may)
            del self._todo[n]  # what is pinned, or damaged, is looked at again by the next writer
        return done

    def _compact(self, record: CommitRecord, there: Collection[str], may: Callable[[], bool]) -> bool:
        """Compact a record unless somebody could restore its commit; whether it was done. A listing may be stale, so
        the store is asked for a shard."""
        saves = saves_of(record)
        if any(save in there for save in saves):
            return False
        if not record.shards:
            # All of the commit is in its record: to compact that is to delete it.
            return delete_save(self._store, record.save_id, (), lambda: self._log.compact(record), may=may)
        # Shards that are missing may come back, and somebody who holds the commit counts on that.
        if self._store.size(record.shards[0].path) is not None or is_held(self._store, saves):
            return False
        self._log.compact(record)
        return True
