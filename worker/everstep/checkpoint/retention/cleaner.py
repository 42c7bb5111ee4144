"""Deletes what `retention` says, after a commit and before a writer's first save, and never fails a save over it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Final

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.layout import (
    DATA,
    KEPT,
    LOG,
    folder_of,
    owner_of,
    record_number,
    save_folder,
    shard_owner,
)
from everstep.checkpoint.format.manifest import NONE, SMALL_BYTES, CommitRecord, OpenRecord, is_compacted, nonfinite_in
from everstep.checkpoint.keep import Keep, Kept, metrics_of, plan_marks
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.decisions import Unreadable
from everstep.checkpoint.log.loads import Loads
from everstep.checkpoint.retention.late_metrics import later_metrics
from everstep.checkpoint.retention.pins import delete_save, held, holds, is_held, mark_kept, read_kept, saves_of
from everstep.storage import ObjectStore, StorageError

# --- plan
# Which saves' objects may be deleted: a pure function of what the log and the listing say. Invariants: the newest
# `keep` usable commits keep every shard they name; what belongs to a newer open record than the caller's, to a save
# that may be in flight, to a pinned one, or to nobody that `layout` knows is never touched. Log records are never
# deleted, as finding the end of the log rests on that; those of deleted commits are compacted.


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete every object of one save."""

    save_id: str
    reason: str


def plan_retention(
    save_ids: Iterable[str],
    commits: Sequence[CommitRecord],
    *,
    keep: int,
    damaged: frozenset[int],
    open_n: int,
    sequence: int,
    pinned: frozenset[str] = frozenset(),
    marked: frozenset[int] = frozenset(),
) -> tuple[Delete, ...]:
    """The saves to delete, sorted by id.

    `save_ids` are the folders that exist, `commits` the newest commits, newest first and at least `keep` of them not
    in `damaged` if there are so many; `open_n` is the caller's own open record and `sequence` that of its newest
    commit; `pinned` are the save ids that somebody pinned. `marked` are commits of a diverged state, and those that
    runs died of: the newest `keep` of them stay for whoever looks into it, but no run goes on from them, so they do
    not count. Raises `ValueError` for `keep` < 1.

    A save of an earlier open that is in no kept commit can never become one, because the caller's open fences it. A
    save of the caller's own open is finished, one way or the other, once a later one has been committed.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least 1 commit must be kept")
    usable = [c for c in commits if c.n not in damaged | marked]
    kept = [*usable[:keep], *[c for c in commits if c.n in marked - damaged][:keep]]
    needed = {folder_of(s.path) for c in kept for s in c.shards} | {c.save_id for c in kept}
    retired = {c.save_id for c in commits}
    plan = []
    for identifier in sorted(set(save_ids) - needed - pinned):
        owner = owner_of(identifier)
        if owner is None or owner[0] > open_n or (owner[0] == open_n and owner[1] >= sequence):
            continue
        what = f"older than the newest {keep} commits" if identifier in retired or owner[0] == open_n else "abandoned"
        plan.append(Delete(identifier, what))
    return tuple(plan)


# --- survey
# Which saves of earlier writers are commits: what a writer has to know that deletes before its first commit. A save of
# an earlier open that is in no record can never become a commit: the newer open fences its writer. A damaged record may
# be a commit's, and until a newer commit exists that may be all that is left of the newest state. Invariant: records
# are read one by one, without a jump over any, and what lies below a damaged one counts as unknown.

MOST: Final = 256  # records read; more of them only where many writers in a row died before their first save


@dataclass(frozen=True, slots=True)
class Survey:
    """The newest commits below an open record, newest first, and the saves of which the log did not tell. What is in
    neither is no commit."""

    commits: tuple[CommitRecord, ...]
    unknown: frozenset[str]


def survey(log: CommitLog, below: int, saves: Collection[str]) -> Survey:
    """Read the log down from record `below` until it tells of each of `saves`. Save ids grow with the log."""
    left = {identifier: order for identifier in saves if (order := owner_of(identifier)) is not None}
    commits = []
    for n in range(below - 1, max(-1, below - 1 - MOST), -1):
        if not left:
            break
        match log.read(n):
            case CommitRecord() as record:
                commits.append(record)
                order = owner_of(record.save_id)
                named = saves_of(record)
                left = {i: o for i, o in left.items() if i not in named and (order is None or o < order)}
            case OpenRecord():
                left = {i: o for i, o in left.items() if o[0] < n}
            case _:
                break
    return Survey(tuple(commits), frozenset(left))


def is_absent(log: CommitLog, save: str) -> bool:
    """Whether the log tells now that this save is no commit."""
    found = survey(log, log.head().last + 1, [save])
    return save not in found.unknown and not any(save in saves_of(record) for record in found.commits)


def is_fenced(name: str, open_n: int) -> bool:
    """Whether the object of this name is a shard of a save that began before record `open_n` opened the log: only its
    own writer writes it, and that one can commit no more."""
    owner = shard_owner(name)
    return owner is not None and owner < open_n


# --- tenure
# Whether a writer still owns the log, asked again and again while it deletes. What a writer may delete follows from its
# own rules and from what it knew of the log. Another one that has taken the log may keep more, so the right to delete
# ends with a newer open record. A store has no deletion with a condition, so there is a look at the end of the log
# before, and it counts for `LOOK_SECONDS` only, by two clocks: a process that was stopped between a look and a request
# looks again when it wakes. One request that is already on its way cannot be called back. Invariant: between two
# deletions lie at most `LOOK_SECONDS`, or a look.

LOOK_SECONDS: Final = 5.0


class Tenure:
    """Of the writer whose newest commit is record `newest`, above its own open record. Raises `StorageError`."""

    def __init__(
        self, log: CommitLog, newest: int, now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._log = log
        self._last = newest
        self._now, self._clock = now, clock
        self._looked: tuple[float, float] | None = None
        self.ended_by: int | None = None  # the record by which another writer took the log

    def lasts(self) -> bool:
        """Whether nobody else had opened the log at the last look, which is at most `LOOK_SECONDS` old."""
        if self.ended_by is None and not self._is_fresh():
            # Before the look: what it shows may be as old as its beginning.
            self._looked = self._now(), self._clock()
            self._last, self.ended_by = self._log.opened_after(self._last)
        return self.ended_by is None

    def _is_fresh(self) -> bool:
        if self._looked is None:
            return False
        now, clock = self._looked
        return 0 <= self._now() - now < LOOK_SECONDS and self._clock() - clock < LOOK_SECONDS


# --- compactor
# Compacts the records of commits whose shards are deleted, after a clean-up. Invariant: a record is replaced only by
# what `compacted` makes of it, and only when no shard of its commit is left and nobody has pinned it: then
# no reader could have restored it. Whoever else compacts the same record writes the same bytes, so nobody has to be
# kept out.

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


# --- marker
# Writes what `keep` decides about the commits of a log, before a clean-up: the marks of what stays beyond the newest.
# Invariant: a commit is looked at before its data may be deleted, also one whose writer died before it could mark it.

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


# --- cleaner

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
