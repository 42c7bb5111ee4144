"""Deletes old saves, after a commit and before a writer's first save. Its errors never make a save fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
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
from everstep.checkpoint.log.loads import LoadMark
from everstep.checkpoint.retention.late_metrics import later_metrics
from everstep.checkpoint.retention.pins import delete_save, held_saves, holds, is_held, mark_kept, read_kept, saves_of
from everstep.storage import ObjectStore, StorageError

# --- plan
# Which saves' objects may be deleted: a pure function of the log and the listing. Invariants: the newest `keep` usable
# commits keep every shard they name. Never deleted are objects of a newer open record than the caller's, of a save that
# may be in flight, of a pinned save, and objects that `layout` does not know. Log records are never deleted, because
# finding the end of the log needs them; those of deleted commits are compacted.


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
    runs died of. The newest `keep` of these stay, so that people can examine them, but they do not count, because no
    run goes on from them. Raises `ValueError` for `keep` < 1.

    A save of an earlier open record that is in no kept commit can never become one, because the caller's open record
    fences it. A save of the caller's own open record has ended once a later one was committed.
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
# Which saves of earlier writers are commits: a writer must know this to delete saves before its first commit. A save of
# an earlier open record that is in no record can never become a commit, because its writer is fenced. A damaged record
# may be a commit's, and as long as there is no newer commit, it may have the newest state. Invariant: records are read
# one by one, none is left out, and the saves below a damaged record count as unknown.

MOST: Final = 256  # records read; more of them only where many writers in a row died before their first save


@dataclass(frozen=True, slots=True)
class Survey:
    """The newest commits below an open record, newest first, and the saves that may or may not be commits. A save that
    is in neither is no commit."""

    commits: tuple[CommitRecord, ...]
    unknown: frozenset[str]


def survey(log: CommitLog, below: int, saves: Collection[str]) -> Survey:
    """Read the log down from record `below` until it is known for each of `saves` whether it is a commit. Save ids grow
    with the log."""
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
    """Whether the log shows that this save is no commit."""
    surveyed = survey(log, log.head().last + 1, [save])
    return save not in surveyed.unknown and not any(save in saves_of(record) for record in surveyed.commits)


def is_fenced(name: str, open_n: int) -> bool:
    """Whether the object of this name is a shard of a save that began before record `open_n` opened the log. Only its
    own writer writes it, and that writer can no longer commit."""
    owner = shard_owner(name)
    return owner is not None and owner < open_n


# --- tenure
# Whether a writer still owns the log, checked again and again while it deletes. A writer deletes by its own rules and
# by what it knows of the log. Another writer that has taken the log may keep more, so the right to delete ends with a
# newer open record. A store has no conditional deletion, so the end of the log is read before. This counts for
# `LOOK_SECONDS` only, by two clocks: a process that was stopped in between reads it again when it wakes. A request that
# was sent already cannot be taken back. Invariant: between two deletions there are at most `LOOK_SECONDS`, or a check.

LOOK_SECONDS: Final = 5.0


class Tenure:
    """The right of a writer to delete. `newest`: the record of its newest commit. Raises `StorageError`."""

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
        """Whether no other writer had opened the log at the last check, which is at most `LOOK_SECONDS` old."""
        if self.ended_by is None and not self._is_fresh():
            # The times are read first: the answer may be as old as the beginning of the request.
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
# the result of `compacted`, and only when no shard of its commit is left and nobody has pinned it: then no reader could
# have restored it. Two processes that compact the same record write the same bytes, so they need no lock.

A_PASS: Final = 8  # records for each clean-up: a save retires one, and the others are left of a crash


class Compactor:
    """Knows which records of one log may be compacted. Methods raise `StorageError`; a later call goes on."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._log = CommitLog(store)
        self._todo: dict[int, CommitRecord | None] = {}  # None: not read yet

    def retire(self, records: Iterable[CommitRecord]) -> None:
        """These commits need not be kept any more."""
        self._todo.update((record.n, record) for record in records)

    def again(self, numbers: Iterable[int]) -> None:
        """The commits of these records have lost their marks; read the records again."""
        for n in numbers:
            self._todo.setdefault(n, None)

    def look(self, below: int) -> None:
        """Add the records below `below`, the oldest commit to keep, that are too large to be compacted. A writer that
        died may have left them, or one of a release that did not compact."""
        for info in self._store.list(LOG):
            n = record_number(info.name)
            if n is not None and n < below and info.size > SMALL_BYTES:
                self._todo.setdefault(n, None)

    def run(
        self, there: Collection[str], most: int = A_PASS, *, may: Callable[[], bool] = lambda: True
    ) -> int:  # fmt: skip
        """Compact at most `most` records, oldest first; returns how many were compacted. `there` are the saves that
        have objects. `may` is called before each record: whether the caller still has the right to."""
        done = 0
        for n in sorted(self._todo)[:most]:
            if not may():
                break
            record = self._todo[n] or self._log.read(n)
            if isinstance(record, CommitRecord) and not is_compacted(record):
                done += self._compact(record, there, may)
            del self._todo[n]  # the next writer checks pinned and damaged ones again
        return done

    def _compact(self, record: CommitRecord, there: Collection[str], may: Callable[[], bool]) -> bool:
        """Compact a record unless its commit could still be restored; returns whether it was compacted. A listing may
        be stale, so one shard is looked up."""
        saves = saves_of(record)
        if any(save in there for save in saves):
            return False
        if not record.shards:
            # All of the commit is in its record: to compact that is to delete it.
            return delete_save(self._store, record.save_id, (), lambda: self._log.compact(record), may=may)
        # Missing shards may come back, so the record of a commit that is pinned or marked is kept whole.
        if self._store.size(record.shards[0].path) is not None or is_held(self._store, saves):
            return False
        self._log.compact(record)
        return True


# --- marker
# Writes the marks that `keep` decides on, before a clean-up: on commits that stay beyond the newest ones. Invariant:
# `keep` decides on each commit before its data may be deleted, also if its writer died before it could mark it.

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
        """Update the marks; returns the records of commits that have lost their mark. `recent` are the newest commits,
        up to record `newest`; `sizes` has the saves that have data, and the names of their objects."""
        all_holds = holds(self._store)
        marks = []
        for identifier in sorted(all_holds.kept):
            mark = self._known.get(identifier) or read_kept(self._store, identifier, all_holds.names(identifier, KEPT))
            if mark is not None:
                self._known[identifier] = mark
                marks.append(mark)
        commits = {record.n: record for record in recent}
        if not self._walked:  # commits of writers that died may be older than those that are to stay
            free = set(sizes) - all_holds.saves
            walked = down_to_the_last(CommitLog(self._store).commits(newest + 1), free)
            commits |= {record.n: record for record in walked if _has_data(record, free)}
        usable = [
            kept_of(r, later_metrics(self._store, r.save_id, sizes.get(r.save_id, ())))
            for r in commits.values()
            if not is_compacted(r) and not unfit(r)
        ]
        shards = {r.save_id: r.shards for r in commits.values() if r.save_id not in all_holds.kept}
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
    """Deletes the saves of a log that `keep` does not keep; a number keeps so many of the newest commits. `own` has
    opened the log. `damaged` are records that were unusable at restore, `suspected` whole ones that earlier runs died
    of, and `restored` the saves that the run goes on from, which stay until its first commit. A later restore changes
    these three."""

    def __init__(
        self,
        store: ObjectStore,
        own: OpenRecord,
        keep: int | Keep,
        damaged: Set[int],
        load_mark: LoadMark | None = None,
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
        self._load_mark = load_mark
        self._compactor = Compactor(store)
        self._recent: list[CommitRecord] = []
        self._unusable: Set[int] = frozenset()  # the damaged and suspected records when `_recent` was read
        self._read_below = False  # whether `_recent` has all commits that are to be kept
        self._lost: Set[int] = frozenset()  # those of `_recent` that are known to have lost shards
        self._has_looked = False  # whether records that earlier writers left uncompacted were searched

    def committed(self, record: CommitRecord) -> None:
        """A new newest commit exists.

        If the commit below it is not the one that this writer knew, an earlier append of its own has succeeded although
        the response was lost. Then the log is read again, or the shards of that commit would count as abandoned.
        """
        known = self._recent[0].n if self._recent else NONE
        if self._read_below and record.commit == known:
            self._recent = [record, *self._recent]
        else:
            self._recent, self._read_below = [record], False

    def make_room(self, void: frozenset[str], *, failed: bool) -> None:
        """Delete what no commit needs before a save is written: a disk may have no room for more states than `keep` and
        that save. Called before the first save, and before each one after a save that `failed` by more than an outage.

        Earlier writers are fenced, so their unfinished uploads can be deleted at any age, and so can their saves that
        are in no record. Commits in the log stay until the first commit of this writer; but once a save has failed,
        those beyond `keep` are deleted. `void` are failed saves of this writer, which are in no record.
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
        """Clean up before the first commit, by the log below this writer's own open record."""
        sizes = sizes_in(self._store)
        older = {save for save in sizes if (order := owner_of(save)) is not None and order[0] < self._own.n}
        if not older and void.isdisjoint(sizes):
            return
        pinned = held_saves(self._store)
        surveyed = survey(self._log, self._own.n, older - pinned)
        committed = {save for record in surveyed.commits for save in saves_of(record)}
        spared = surveyed.unknown.union(self._restored)
        tenure = Tenure(self._log, self._own.n)
        self._delete((older - pinned - committed - spared) | void, sizes, tenure)
        if not failed or not tenure.lasts():
            return

        def is_lost(record: CommitRecord) -> bool:
            return has_lost(self._store, record, sizes)

        recent = self._enough(surveyed.commits, is_lost)
        if self._marker is not None:
            self._compactor.again(
                self._marker.mark(self._own.n - 1, surveyed.commits, sizes, lambda r: self._unfit(r, is_lost))
            )
        damaged = frozenset(self._damaged | {r.n for r in recent if is_lost(r)})
        clean(
            self._store, sizes, recent, self._keep, damaged, self._own.n, 0, suspected=frozenset(self._suspected),
            spared=spared, may=tenure.lasts,
        )  # fmt: skip

    def _delete(self, saves: Set[str], sizes: Sizes, tenure: Tenure) -> None:
        """Delete saves that are no commits. Nobody can pin them, so no object has to announce their deletion; a full
        disk would have no room for one."""
        for save in sorted(saves & sizes.keys()):
            for name in sizes[save]:
                if not tenure.lasts():
                    return
                self._store.delete(name)
            log.info("deleted %s: it never became a commit", save_folder(save))

    def clean(self) -> None:
        """Delete the saves that are not needed any more. Called after `committed`. A writer that has lost the log
        deletes nothing: see `Tenure`.

        A commit counts only if it can be read: the newest record is read back, and a commit with shards that are
        missing, or have another size, does not count as one that is kept.
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
        if isinstance(record := self._log.read(newest.n), Unreadable):
            log.error(
                "log record %d was just written, and cannot be read: %s; nothing is deleted", record.n, record.reason
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
            walked = down_to_the_last(self._log.commits(newest.n), sizes)
            below = (record for record in walked if _has_data(record, sizes) or not is_lost(record))
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
            if self._load_mark is not None:
                self._load_mark.clear(newest.n)
            self._has_looked = True
        self._compactor.run(set(sizes) - {d.save_id for d in deleted}, may=tenure.lasts)

    def _unfit(self, record: CommitRecord, is_lost: Callable[[CommitRecord], bool]) -> bool:
        """Whether no run would go on from this commit."""
        return bool(nonfinite_in(record)) or record.n in self._damaged | self._suspected or is_lost(record)

    def _enough(self, commits: Iterable[CommitRecord], is_lost: Callable[[CommitRecord], bool]) -> list[CommitRecord]:
        return enough(commits, self._keep, lambda r: r.n in self._damaged or is_lost(r), frozenset(self._suspected))


def down_to_the_last(commits: Iterable[CommitRecord | Unreadable], saves: Iterable[str]) -> Iterator[CommitRecord]:
    """The commits, newest first, down to the oldest that may have data among `saves`, because save ids grow with the
    log: else a long log would be read to its beginning. A commit without shards has all of it in its record."""
    oldest = min((order for order in map(owner_of, saves) if order is not None), default=None)
    for commit in commits:
        if isinstance(commit, Unreadable):
            continue
        order = owner_of(commit.save_id)
        if commit.shards and order is not None and (oldest is None or order < oldest):
            return
        yield commit


def _has_data(record: CommitRecord, saves: Container[str]) -> bool:
    return not record.shards or any(folder_of(shard.path) in saves for shard in record.shards)


def enough(
    commits: Iterable[CommitRecord],
    keep: int,
    damaged: Callable[[CommitRecord], bool],
    suspected: frozenset[int] = frozenset(),
) -> list[CommitRecord]:
    """Those of the commits, newest first, that `plan_retention` needs: down to the `keep`-th usable one."""
    needed: list[CommitRecord] = []
    usable = marked = 0
    for commit in commits:
        if nonfinite_in(commit) or commit.n in suspected:
            marked += 1
            if marked > keep:
                continue
        elif not damaged(commit):
            usable += 1
        needed.append(commit)
        if usable == keep:
            break
    return needed


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
    """Whether a shard of the commit is missing, or has another size. A listing may be stale, so the shards that it
    lacks are looked up one by one, up to the first one that is lost."""
    if is_compacted(record):
        return True
    expected = {s.path: s.bytes for s in record.shards}
    return any(store.size(path) != expected[path] for path in missing(record, sizes))


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
    """Delete the saves that `plan_retention` plans for these commits and folders; returns the deletions.

    Without `really`, nothing is deleted, and the plan is returned. `spared` are saves that stay. `may` is called before
    each object: whether the caller may still delete it.
    """
    marked = suspected | {c.n for c in commits if nonfinite_in(c)}
    plan = plan_retention(
        sizes,
        commits,
        keep=keep,
        damaged=damaged,
        open_n=open_n,
        sequence=sequence,
        pinned=held_saves(store) | spared,
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
