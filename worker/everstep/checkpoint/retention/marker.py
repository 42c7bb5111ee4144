"""Writes what `keep` decides about the commits of a log, before a clean-up: the marks of what stays beyond the newest.

Invariant: a commit is looked at before its data may be deleted, also one whose writer died before it could mark it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType

from everstep.checkpoint.format.compaction import is_compacted
from everstep.checkpoint.format.layout import KEPT, folder_of, owner_of
from everstep.checkpoint.format.manifest import CommitRecord
from everstep.checkpoint.keep import Keep, Kept, metrics_of, plan_marks
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.retention.late_metrics import later_metrics
from everstep.checkpoint.retention.pins import holds, mark_kept, read_kept
from everstep.storage import ObjectStore

log = logging.getLogger("everstep.checkpoint")


class Marker:
    """The marks of one log, under the rules of the writer that has it open. `mark` raises `StorageError`."""

    def __init__(self, store: ObjectStore, keep: Keep) -> None:
        self._store = store
        self._keep = keep
        self._known: dict[str, Kept] = {}  # marks that were read or written
        self._walked = False

    def mark(
        self,
        newest: int,
        recent: Sequence[CommitRecord],
        sizes: Mapping[str, Collection[str]],
        unfit: Callable[[CommitRecord], bool],
    ) -> list[int]:
        """Bring the marks up to date; the records of commits that lost theirs. `recent` are the newest commits, up to
        record `newest`; `sizes` has the saves that have data, and the names of their objects."""
        found = holds(self._store)
        marks = []
        for identifier in sorted(found.kept):
            mark = self._known.get(identifier) or read_kept(self._store, identifier, found.names(identifier, KEPT))
            if mark is not None:
                self._known[identifier] = mark
                marks.append(mark)
        commits = {record.n: record for record in recent}
        if not self._walked:  # commits of writers that died may be older than those that are to stay
            commits |= {record.n: record for record in self._with_data(newest, set(sizes) - found.saves)}
        usable = [
            kept_of(r, later_metrics(self._store, r.save_id, sizes.get(r.save_id, ())))
            for r in commits.values()
            if not is_compacted(r) and not unfit(r)
        ]
        shards = {r.save_id: r.shards for r in commits.values() if r.save_id not in found.kept}
        lost = []
        for mark in plan_marks(self._keep, marks, usable):
            if mark_kept(self._store, mark, shards.get(mark.save_id, ())):
                self._known[mark.save_id] = mark
                if not mark.why:
                    lost.append(mark.n)
            else:
                log.warning(
                    "step %d is not marked to be kept: another process deletes it, or has deleted it", mark.step
                )
        self._walked = True
        return lost

    def _with_data(self, newest: int, left: set[str]) -> Iterator[CommitRecord]:
        """The commits up to `newest` down to the oldest of the saves in `left`: save ids grow with the log."""
        orders = {order for order in map(owner_of, left) if order is not None}
        for record in CommitLog(self._store).commits(newest + 1):
            if not isinstance(record, CommitRecord) or (order := owner_of(record.save_id)) is None:
                continue
            if not any(o <= order for o in orders):
                return
            orders.discard(order)
            if any(folder_of(s.path) in left for s in record.shards):
                yield record


def kept_of(record: CommitRecord, later: Mapping[str, float] = MappingProxyType({})) -> Kept:
    """The facts on a commit that retention needs. `later`: metrics that became known after its save."""
    try:
        at = datetime.fromisoformat(record.at).timestamp()
    except ValueError:
        at = 0.0
    return Kept(record.save_id, record.n, record.step, at, {**metrics_of(record.values), **later})
