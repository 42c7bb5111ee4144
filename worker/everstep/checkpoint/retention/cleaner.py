"""Deletes what `retention` says, after a commit, and never fails a save over it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Final

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.compaction import is_compacted
from everstep.checkpoint.format.layout import DATA, folder_of, owner_of, save_folder
from everstep.checkpoint.format.manifest import NONE, CommitRecord, OpenRecord, nonfinite_in
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.decisions import Unreadable
from everstep.checkpoint.log.loads import Loads
from everstep.checkpoint.retention.compactor import Compactor
from everstep.checkpoint.retention.marker import Marker
from everstep.checkpoint.retention.pins import delete_save, held
from everstep.checkpoint.retention.plan import Delete, plan_retention
from everstep.checkpoint.retention.tenure import Tenure
from everstep.storage import ObjectStore, StorageError

log = logging.getLogger("everstep.checkpoint")

# An upload older than this is of no save that could still become a commit: its writer would have given it up long ago.
UPLOAD_SECONDS: Final = 24 * 3600.0


Sizes = Mapping[str, Mapping[str, int]]  # save id → object → bytes


class Cleaner:
    """Keeps what `keep` says of a log that `own` has open; a number is that of the newest commits. `damaged` are
    records found unusable at restore, `suspected` those that are whole, and that earlier runs died of. A later restore
    adds to both."""

    def __init__(
        self,
        store: ObjectStore,
        own: OpenRecord,
        keep: int | Keep,
        damaged: Set[int],
        loads: Loads | None = None,
        *,
        suspected: Set[int] = frozenset(),
    ) -> None:
        self._store = store
        self._log = CommitLog(store)
        self._own = own
        rules = keep if isinstance(keep, Keep) else Keep(keep)
        self._keep = rules.last
        self._marker = Marker(store, rules) if rules.more else None
        self._damaged = damaged
        self._suspected = suspected
        self._loads = loads
        self._compactor = Compactor(store)
        self._recent: list[CommitRecord] = []
        self._unusable: Set[int] = frozenset()  # of which `_recent` knows
        self._read_below = False  # whether `_recent` holds all commits that are to be kept
        self._lost: Set[int] = frozenset()  # those of `_recent` that are known to have lost shards
        self._swept = False

    def committed(self, record: CommitRecord) -> None:
        """A new newest commit exists.

        If the commit below it is not the one this writer knew, an append of its own whose outcome was never learnt
        did succeed: then what is known is read again, or its shards would be taken for abandoned ones.
        """
        known = self._recent[0].n if self._recent else NONE
        if self._read_below and record.commit == known:
            self._recent = [record, *self._recent]
        else:
            self._recent, self._read_below = [record], False

    def clean(self) -> None:
        """Delete the saves that are not needed any more. Called after `committed`. A writer that another has taken the
        log from deletes nothing: see `tenure`.

        A commit counts only if it can be read: the newest record is read back, and shards that are not there, or not of
        their size, make room for none that are.
        """
        try:
            newest = self._recent[0]
            tenure = Tenure(self._log, newest.n)
            if not tenure.lasts():
                log.warning("another writer has opened the log (record %d): nothing is deleted", tenure.ended_by)
                return
            if isinstance(found := self._log.read(newest.n), Unreadable):
                log.error(
                    "log record %d was just written, and cannot be read: %s; nothing is deleted", found.n, found.reason
                )
                return
            sizes = sizes_in(self._store)
            answers: dict[int, bool] = {}  # the store is asked once for each commit

            def is_lost(record: CommitRecord) -> bool:
                if record.n not in answers:
                    answers[record.n] = has_lost(self._store, record, sizes)
                return answers[record.n]

            gone = frozenset(r.n for r in self._recent if is_lost(r)) - self._lost
            if gone:
                log.error("the commits of log records %s have lost shards; they do not count as kept", sorted(gone))
            if (unusable := frozenset(self._damaged | self._suspected)) != self._unusable:
                self._unusable, self._read_below = unusable, False
            if not self._read_below or gone:
                below = stored(self._log.commits(newest.n), sizes, is_lost)
                self._recent, self._read_below = [newest, *self._enough(below, is_lost)], True
                self._lost = frozenset(r.n for r in self._recent if is_lost(r))
            if self._marker is not None and tenure.lasts():
                self._compactor.again(
                    self._marker.mark(newest.n, self._recent, sizes, lambda r: self._unfit(r, is_lost))
                )
            known, self._recent = self._recent, self._enough(self._recent, is_lost)
            kept = {r.n for r in self._recent}
            self._compactor.retire(r for r in known if r.n not in kept)
            damaged = frozenset(self._damaged | {r.n for r in self._recent if is_lost(r)})
            owner = owner_of(newest.save_id)
            deleted = clean(
                self._store, sizes, self._recent, self._keep, damaged, self._own.n, owner[1] if owner else 0,
                suspected=frozenset(self._suspected), may=tenure.lasts,
            )  # fmt: skip
            if not tenure.lasts():
                return
            if not self._swept:
                self._compactor.look(min(kept))
                if self._loads is not None:
                    self._loads.clear(newest.n)
                self._store.sweep_uploads(UPLOAD_SECONDS)
                self._swept = True
            self._compactor.run(set(sizes) - {d.save_id for d in deleted}, may=tenure.lasts)
        except (StorageError, CheckpointError) as e:
            log.warning("clean-up after a commit failed, the next one tries again: %s", e)

    def _unfit(self, record: CommitRecord, is_lost: Callable[[CommitRecord], bool]) -> bool:
        """Whether no run would go on from it."""
        return bool(nonfinite_in(record)) or record.n in self._damaged | self._suspected or is_lost(record)

    def _enough(self, commits: Iterable[CommitRecord], is_lost: Callable[[CommitRecord], bool]) -> list[CommitRecord]:
        return enough(commits, self._keep, lambda r: r.n in self._damaged or is_lost(r), frozenset(self._suspected))


def stored(
    commits: Iterable[CommitRecord | Unreadable], sizes: Sizes, is_lost: Callable[[CommitRecord], bool]
) -> Iterator[CommitRecord]:
    """Of commits, newest first, those that still have data, down to the oldest save that has: save ids grow with the
    log. A run that keeps more commits than the one before it would else read all of a long log for those that are
    deleted."""
    oldest = min((owner for owner in map(owner_of, sizes) if owner is not None), default=None)
    for commit in commits:
        if isinstance(commit, Unreadable):
            continue
        owner = owner_of(commit.save_id)
        if owner is not None and (oldest is None or owner < oldest):
            return
        if not is_lost(commit) or any(folder_of(s.path) in sizes for s in commit.shards):
            yield commit


def enough(
    commits: Iterable[CommitRecord],
    keep: int,
    damaged: Callable[[CommitRecord], bool],
    suspected: frozenset[int] = frozenset(),
) -> list[CommitRecord]:
    """Of commits, newest first, those that `plan_retention` must know of: down to the `keep`-th that is usable."""
    found: list[CommitRecord] = []
    usable = marked = 0
    for commit in commits:
        if nonfinite_in(commit) or commit.n in suspected:
            marked += 1
            if marked > keep:
                continue
        elif not damaged(commit):
            usable += 1
        found.append(commit)
        if usable == keep:
            break
    return found


def sizes_in(store: ObjectStore) -> dict[str, dict[str, int]]:
    """The objects of all saves: save id → object → bytes."""
    sizes: dict[str, dict[str, int]] = {}
    for info in store.list(DATA):
        sizes.setdefault(info.name.split("/")[1], {})[info.name] = info.size
    return sizes


def missing(record: CommitRecord, sizes: Sizes) -> tuple[str, ...]:
    """The commit's shards that are not listed, or with another size."""
    return tuple(s.path for s in record.shards if sizes.get(folder_of(s.path) or "", {}).get(s.path) != s.bytes)


def has_lost(store: ObjectStore, record: CommitRecord, sizes: Sizes) -> bool:
    """Whether a shard of the commit is not there, or of another size. A listing may be stale, so the store is asked for
    those that it lacks, up to the first that is lost: of a commit that was deleted, one."""
    if is_compacted(record):
        return True
    told = {s.path: s.bytes for s in record.shards}
    return any(store.size(path) != told[path] for path in missing(record, sizes))


def clean(
    store: ObjectStore,
    sizes: Sizes,
    commits: list[CommitRecord],
    keep: int,
    damaged: frozenset[int],
    open_n: int,
    sequence: int,
    *,
    suspected: frozenset[int] = frozenset(),
    really: bool = True,
    may: Callable[[], bool] = lambda: True,
) -> tuple[Delete, ...]:
    """Delete what `plan_retention` says of these commits and of the folders that exist; what was deleted.

    Without `really`, what would be. `may` is asked before each object, whether the caller still may delete it.
    """
    marked = suspected | {c.n for c in commits if nonfinite_in(c)}
    plan = plan_retention(
        sizes,
        commits,
        keep=keep,
        damaged=damaged,
        open_n=open_n,
        sequence=sequence,
        pinned=held(store),
        marked=marked,
    )
    if not really:
        return plan
    done = []
    for delete in plan:
        if not may():
            break
        if delete_save(store, delete.save_id, list(sizes[delete.save_id]), may=may):
            done.append(delete)
            log.info("deleted %s: %s", save_folder(delete.save_id), delete.reason)
    return tuple(done)
