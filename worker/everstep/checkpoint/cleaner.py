"""Deletes what `retention` says, after a commit, and never fails a save over it."""

from __future__ import annotations

import logging

from everstep.checkpoint.commitlog import CommitLog
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.layout import DATA, owner_of, save_folder
from everstep.checkpoint.manifest import NONE, CommitRecord, OpenRecord
from everstep.checkpoint.retention import plan_retention
from everstep.storage import ObjectStore, StorageError

log = logging.getLogger("everstep.checkpoint")


class Cleaner:
    """Keeps the newest `keep` commits of a log that `own` has open. `damaged` are records found unusable at restore."""

    def __init__(self, store: ObjectStore, own: OpenRecord, keep: int, damaged: frozenset[int]) -> None:
        self._store = store
        self._own = own
        self._keep = keep
        self._damaged = damaged
        self._recent: list[CommitRecord] = []
        self._read_below = False  # whether `_recent` holds all commits that are to be kept

    def committed(self, record: CommitRecord) -> None:
        """A new newest commit exists.

        If the commit below it is not the one this writer knew, an append of its own whose outcome was never learnt
        did succeed: then what is known is read again, or its shards would be taken for abandoned ones.
        """
        known = self._recent[0].n if self._recent else NONE
        if self._read_below and record.commit == known:
            self._recent = [record, *self._recent][: self._keep + len(self._damaged)]
        else:
            self._recent, self._read_below = [record], False

    def clean(self) -> None:
        """Delete the saves that are not needed any more. Called after `committed`."""
        try:
            self._read()
            listed = [info.name for info in self._store.list(DATA)]
            names: dict[str, list[str]] = {}
            for name in listed:
                names.setdefault(name.split("/")[1], []).append(name)
            newest = owner_of(self._recent[0].save_id)
            sequence = newest[1] if newest else 0
            plan = plan_retention(
                names, self._recent, keep=self._keep, damaged=self._damaged, open_n=self._own.n, sequence=sequence
            )
            for delete in plan:
                for name in names[delete.save_id]:
                    self._store.delete(name)
                log.info("deleted %s: %s", save_folder(delete.save_id), delete.reason)
        except (StorageError, CheckpointError) as e:
            log.warning("clean-up after a commit failed, the next one tries again: %s", e)

    def _read(self) -> None:
        """The commits below the newest, as many as are kept."""
        if self._read_below:
            return
        usable = sum(r.n not in self._damaged for r in self._recent)
        for record in CommitLog(self._store).commits(self._recent[0].n):
            if usable >= self._keep:
                break
            if isinstance(record, CommitRecord):
                self._recent.append(record)
                usable += record.n not in self._damaged
        self._read_below = True
