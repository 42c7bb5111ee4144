"""Deletes what `retention` says, after a commit and before a writer's first save, and never fails a save over it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
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
from everstep.checkpoint.retention.pins import delete_save, held, saves_of
from everstep.checkpoint.retention.plan import Delete, plan_retention
from everstep.checkpoint.retention.survey import is_fenced, survey
from everstep.checkpoint.retention.tenure import Tenure
from everstep.storage import ObjectStore, StorageError

log = logging.getLogger("everstep.checkpoint")

# An upload older than this is of no save that could still become a commit: its writer would have given it up long ago.
UPLOAD_SECONDS: Final = 24 * 3600.0


Sizes = Mapping[str, Mapping[str, int]]  # save id → object → bytes


class Cleaner:
    """Keeps what `keep` says of a log that `own` has open; a number is that of the newest commits. `damaged` are
    records found unusable at restore, `suspected` those that are whole, and that earlier runs died of; `restored` the
    saves that the run goes on from, which stay until its first commit. A later restore changes them."""

    def __init__(
        self,
        store: ObjectStore,
        own: OpenRecord,
        keep: int | Keep,
        damaged: Set[int],
        loads: Loads | None = None,
        *,
        suspected: Set[int] = frozenset(),
        restored: Collection[str] = (),
    ) -> None:
        self._store = store
        self._log = CommitLog(store)
        self._own = own
        rules = keep if isinstance(keep, Keep) else Keep(keep)
        self._keep = rules.last
        self._marker = Marker(store, rules) if rules.more else None
        self._damaged = damaged
        self._suspected = suspected
        self._restored = restored
        self._loads = loads
        self._compactor = Compactor(store)
        self._recent: list[CommitRecord] = []
        self._unusable: Set[int] = frozenset()  # of which `_recent` knows
        self._read_below = False  # whether `_recent` holds all commits that are to be kept
        self._lost: Set[int] = frozenset()  # those of `_recent` that are known to have lost shards
        self._has_looked = False  # for what earlier writers left uncompacted

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

    def make_room(self, void: frozenset[str], *, failed: bool) -> None:
        """Delete what no commit needs, before the bytes of a save are written: a disk may have room for no more states
        than `keep` and that save. Called before the first save, and before each one after a save that `failed` by more
        than an outage.

        The writers before this one are fenced: their unfinished uploads are dead at any age, and so are their saves
        that are in no record. Commits of the log stay until the first one of this writer, but for those beyond `keep`
        once a save has failed. `void` are failed saves of this writer, which are in no record.
        """
        try:
            self._store.sweep_uploads(UPLOAD_SECONDS, lambda name: is_fenced(name, self._own.n))
            if self._recent:
                sizes = sizes_in(self._store)
                self._delete(void, sizes, Tenure(self._log, self._recent[0].n))
                self._clean({save: names for save, names in sizes.items() if save not in void})
            elif self._own.n or void:
                self._clean_below(void, failed)
        except (StorageError, CheckpointError) as e:
            log.warning("the clean-up before a save failed: %s", e)

    def _clean_below(self, void: frozenset[str], failed: bool) -> None:
        """Before the first commit: by what the log holds below this writer's own open record."""
        sizes = sizes_in(self._store)
        older = {save for save in sizes if (order := owner_of(save)) is not None and order[0] < self._own.n}
        if not older and void.isdisjoint(sizes):
            return
        pinned = held(self._store)
        found = survey(self._log, self._own.n, older - pinned)
        committed = {save for record in found.commits for save in saves_of(record)}
        spared = found.unknown.union(self._restored)
        tenure = Tenure(self._log, self._own.n)
        self._delete((older - pinned - committed - spared) | void, sizes, tenure)
        if not failed or not tenure.lasts():
            return

        def is_lost(record: CommitRecord) -> bool:
            return has_lost(self._store, record, sizes)

        recent = self._enough(found.commits, is_lost)
        if self._marker is not None:
            self._compactor.again(
                self._marker.mark(self._own.n - 1, found.commits, sizes, lambda r: self._unfit(r, is_lost))
            )
        damaged = frozenset(self._damaged | {r.n for r in recent if is_lost(r)})
        clean(
            self._store, sizes, recent, self._keep, damaged, self._own.n, 0, suspected=frozenset(self._suspected),
            spared=spared, may=tenure.lasts,
        )  # fmt: skip

    def _delete(self, saves: Set[str], sizes: Sizes, tenure: Tenure) -> None:
        """Delete saves that are no commits. Nobody can pin them, so this needs no object that says so, for which a
        full disk has no room."""
        for save in sorted(saves & sizes.keys()):
            for name in sizes[save]:
                if not tenure.lasts():
                    return
                self._store.delete(name)
            log.info("deleted %s: it never became a commit", save_folder(save))

    def clean(self) -> None:
        """Delete the saves that are not needed any more. Called after `committed`. A writer that another has taken the
        log from deletes nothing: see `tenure`.

        A commit counts only if it can be read: the newest record is read back, and shards that are not there, or not of
        their size, make room for none that are.
        """
        try:
            self._clean(sizes_in(self._store))
        except (StorageError, CheckpointError) as e:
            log.warning("clean-up after a commit failed, the next one tries again: %s", e)

    def _clean(self, sizes: Sizes) -> None:
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
            self._compactor.again(self._marker.mark(newest.n, self._recent, sizes, lambda r: self._unfit(r, is_lost)))
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
        if not self._has_looked:
            self._compactor.look(min(kept))
            if self._loads is not None:
                self._loads.clear(newest.n)
            self._has_looked = True
        self._compactor.run(set(sizes) - {d.save_id for d in deleted}, may=tenure.lasts)

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
    spared: frozenset[str] = frozenset(),
    really: bool = True,
    may: Callable[[], bool] = lambda: True,
) -> tuple[Delete, ...]:
    """Delete what `plan_retention` says of these commits and of the folders that exist; what was deleted.

    Without `really`, what would be. `spared` are saves that stay. `may` is asked before each object, whether the
    caller still may delete it.
    """
    marked = suspected | {c.n for c in commits if nonfinite_in(c)}
    plan = plan_retention(
        sizes,
        commits,
        keep=keep,
        damaged=damaged,
        open_n=open_n,
        sequence=sequence,
        pinned=held(store) | spared,
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
