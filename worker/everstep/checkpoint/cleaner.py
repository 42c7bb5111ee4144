"""Deletes what `retention` says, after a commit, and never fails a save over it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from typing import Final

from everstep.checkpoint.commitlog import CommitLog
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.layout import DATA, owner_of, save_folder
from everstep.checkpoint.loads import Loads
from everstep.checkpoint.manifest import NONE, CommitRecord, OpenRecord, nonfinite_in
from everstep.checkpoint.pins import delete_save, pinned
from everstep.checkpoint.retention import Delete, plan_retention
from everstep.storage import ObjectStore, StorageError

log = logging.getLogger("everstep.checkpoint")

# An upload older than this is of no save that could still become a commit: its writer would have given it up long ago.
UPLOAD_SECONDS: Final = 24 * 3600.0


class Cleaner:
    """Keeps the newest `keep` commits of a log that `own` has open. `damaged` are records found unusable at restore."""

    def __init__(
        self, store: ObjectStore, own: OpenRecord, keep: int, damaged: frozenset[int], loads: Loads | None = None
    ) -> None:
        self._store = store
        self._own = own
        self._keep = keep
        self._damaged = damaged
        self._loads = loads
        self._recent: list[CommitRecord] = []
        self._read_below = False  # whether `_recent` holds all commits that are to be kept
        self._swept = False

    def committed(self, record: CommitRecord) -> None:
        """A new newest commit exists.

        If the commit below it is not the one this writer knew, an append of its own whose outcome was never learnt
        did succeed: then what is known is read again, or its shards would be taken for abandoned ones.
        """
        known = self._recent[0].n if self._recent else NONE
        if self._read_below and record.commit == known:
            self._recent = enough([record, *self._recent], self._keep, self._damaged)
        else:
            self._recent, self._read_below = [record], False

    def clean(self) -> None:
        """Delete the saves that are not needed any more. Called after `committed`."""
        try:
            if not self._read_below:
                below = CommitLog(self._store).commits(self._recent[0].n)
                readable = (record for record in below if isinstance(record, CommitRecord))
                self._recent = enough(itertools.chain(self._recent, readable), self._keep, self._damaged)
                self._read_below = True
            newest = owner_of(self._recent[0].save_id)
            clean(self._store, self._recent, self._keep, self._damaged, self._own.n, newest[1] if newest else 0)
            if not self._swept:
                if self._loads is not None:
                    self._loads.clear(self._recent[0].n)
                self._store.sweep_uploads(UPLOAD_SECONDS)
                self._swept = True
        except (StorageError, CheckpointError) as e:
            log.warning("clean-up after a commit failed, the next one tries again: %s", e)


def enough(commits: Iterable[CommitRecord], keep: int, damaged: frozenset[int]) -> list[CommitRecord]:
    """Of commits, newest first, those that `plan_retention` must know of: down to the `keep`-th that is usable."""
    found: list[CommitRecord] = []
    usable = marked = 0
    for commit in commits:
        if nonfinite_in(commit):
            marked += 1
            if marked > keep:
                continue
        elif commit.n not in damaged:
            usable += 1
        found.append(commit)
        if usable == keep:
            break
    return found


def clean(
    store: ObjectStore,
    commits: list[CommitRecord],
    keep: int,
    damaged: frozenset[int],
    open_n: int,
    sequence: int,
    *,
    really: bool = True,
) -> tuple[Delete, ...]:
    """Delete what `plan_retention` says of these commits and of the folders that exist; what was deleted.

    Without `really`, what would be.
    """
    names: dict[str, list[str]] = {}
    for info in store.list(DATA):
        names.setdefault(info.name.split("/")[1], []).append(info.name)
    marked = frozenset(c.n for c in commits if nonfinite_in(c))
    plan = plan_retention(
        names,
        commits,
        keep=keep,
        damaged=damaged,
        open_n=open_n,
        sequence=sequence,
        pinned=pinned(store),
        marked=marked,
    )
    if not really:
        return plan
    done = []
    for delete in plan:
        if delete_save(store, delete.save_id, names[delete.save_id]):
            done.append(delete)
            log.info("deleted %s: %s", save_folder(delete.save_id), delete.reason)
    return tuple(done)
