"""The commits of a store for use outside of training: they are found, checked, pinned and cleaned up without the log.

Knows no torch: the command line uses it as it is. Invariant: nothing here can disturb the run that owns the log. It
only deletes what that run's own clean-up might delete too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from everstep.checkpoint.errors import CheckpointError, NoCommit
from everstep.checkpoint.format.chunks import verify
from everstep.checkpoint.format.layout import folder_of, owner_of
from everstep.checkpoint.format.manifest import CommitRecord, is_compacted, nonfinite_in
from everstep.checkpoint.format.steps import named_commit
from everstep.checkpoint.keep import metrics_of
from everstep.checkpoint.log.commitlog import MAX_WALK, CommitLog, now
from everstep.checkpoint.log.decisions import Unreadable
from everstep.checkpoint.retention import pins
from everstep.checkpoint.retention.cleaner import (
    UPLOAD_SECONDS,
    Compactor,
    Delete,
    clean,
    down_to_the_last,
    enough,
    has_lost,
    is_fenced,
    missing,
    sizes_in,
)
from everstep.checkpoint.retention.late_metrics import later_metrics
from everstep.checkpoint.retention.pins import Holds
from everstep.storage import ObjectStore

NOTHING: Final = Holds()
UNFINISHED: Final = "left unfinished by a killed writer"


@dataclass(frozen=True, slots=True)
class Found:
    """A commit in the log. Only names and sizes of its shards were checked, not the bytes."""

    step: int
    n: int
    save_id: str
    at: str
    world_size: int
    bytes: int
    pinned: bool = False
    missing: tuple[str, ...] = ()  # shards that are missing, or of another size
    nonfinite: tuple[str, ...] = ()  # parameters that hold NaN or infinity, if the commit was marked for them
    kept: bool = False  # whether a rule of the run keeps it beyond the newest ones: see `Keep`
    tags: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)  # that `save` and `add_metrics` were given

    @classmethod
    def of(
        cls, record: CommitRecord, holds: Holds = NOTHING, missing: tuple[str, ...] = (),
        later: Mapping[str, float] = MappingProxyType({}),
    ) -> Found:  # fmt: skip
        save = record.save_id
        return cls(
            record.step, record.n, save, record.at, record.world_size, record.bytes, save in holds.pinned, missing,
            nonfinite_in(record), save in holds.kept, holds.tags_of(save),
            {**metrics_of(record.values), **later},
        )  # fmt: skip


class Catalog:
    """The commits below one store. Methods raise `StorageError` beside what they name."""

    def __init__(self, store: ObjectStore, start: int = 0) -> None:
        self._store = store
        self._log = CommitLog(store, start)

    def latest(self) -> CommitRecord | None:
        """The newest commit in the log, of any writer."""
        return next((record for record in self._commits() if not is_compacted(record)), None)

    def begun(self) -> bool:
        """Whether there is a log at all: a run has been here, even if it made no commit."""
        return self._log.head().last >= 0

    def list(self, limit: int = 1000) -> tuple[Found, ...]:
        """The newest commits that have their data, newest first. The shards of older ones are deleted."""
        end = self._log.head().last  # read first: commits up to here have their shards in the listing that follows
        sizes = sizes_in(self._store)
        holds = pins.holds(self._store)
        walked = {r.n: r for r in itertools.islice(self._with_data(end, sizes.keys() - holds.saves), limit)}
        walked |= {r.n: r for r in self._held_commits(holds) if r.n <= end and not is_compacted(r)}
        newest_first = (walked[n] for n in sorted(walked, reverse=True))
        present = (r for r in newest_first if not r.shards or any(folder_of(s.path) in sizes for s in r.shards))
        return tuple(
            Found.of(r, holds, missing(r, sizes), later_metrics(self._store, r.save_id, sizes.get(r.save_id, ())))
            for r in present
        )

    def find(self, step: int | None = None, n: int | None = None, tag: str | None = None) -> CommitRecord:
        """The newest commit, or the newest of `step`, or record `n`, or that of `tag`. Raises `NoCommit` if there is
        none, `CheckpointError` if a tag is given beside one of the others, and `TypeError` for a step that is no
        integer."""
        step, n = named_commit(step, n)
        if tag is not None:
            if step is not None or n is not None:
                raise CheckpointError("give a step, a record or a tag, not two of them")
            return self.tagged(tag)
        if n is not None:
            return self._record(n, step)
        steps = []
        deleted = ""
        for record in itertools.chain(self._commits(), self._held_commits()):
            if is_compacted(record):
                if record.step == step and not deleted:
                    deleted = f": it was deleted, and record {record.n} is compacted"
                continue
            if step is None or record.step == step:
                return record
            steps.append(record.step)
        if step is None or not steps:
            raise NoCommit(f"{self._store.url}: there is no commit")
        shown = ", ".join(map(str, steps[:10])) + (", …" if len(steps) > 10 else "")
        raise NoCommit(f"{self._store.url}: no commit of step {step}{deleted}; there are steps {shown}")

    def verify(self, step: int | None = None, n: int | None = None) -> tuple[str, ...]:
        """The problems of a commit's shards; each text names a file. Empty if the commit is whole. Reads every byte."""
        return verify(self._store, self.find(step, n))

    def pin(self, step: int | None = None, n: int | None = None) -> CommitRecord:
        """Keep a commit until `unpin`: no clean-up deletes it, whatever its rules are. Raises `CheckpointError`."""
        record = self.find(step, n)
        pins.pin(self._store, record, now())
        return record

    def unpin(self, step: int | None = None, n: int | None = None) -> CommitRecord:
        """Remove a commit's pin, and the mark by which a run's rules keep it. A tag stays, and still keeps the commit.
        Raises `CheckpointError` if there is no such commit."""
        record = self.find(step, n)
        pins.unpin(self._store, record)
        return record

    def tag(self, tag: str, step: int | None = None, n: int | None = None) -> CommitRecord:
        """Call a commit `tag`, and keep it until `untag`; the commit that was called so before is not any more.
        Raises `CheckpointError`, also for a tag that is no name: 1 to 64 letters, digits, '.', '_' and '-'."""
        record = self.find(step, n)
        pins.tag(self._store, record, tag, now())
        return record

    def untag(self, tag: str) -> None:
        """Take a tag away; the commit stays as long as something else keeps it. Raises `NoCommit` if there is none."""
        if not pins.untag(self._store, tag):
            raise NoCommit(self._unknown(tag, pins.holds(self._store)))

    def tagged(self, tag: str) -> CommitRecord:
        """The commit of this tag. Raises `NoCommit` if there is none, `CheckpointError` if a move of it was cut off."""
        holds = pins.holds(self._store)
        tagged = holds.of_tag(tag)
        by_number = {r.n: r for r in self._held_commits(tagged) if r.save_id in tagged.saves}
        if tagged.saves and not by_number:  # the tag's object is damaged; its name still says which save
            by_number = {r.n: r for r in self._commits() if r.save_id in tagged.saves}
        if len(by_number) > 1:
            steps = " and ".join(str(r.step) for r in by_number.values())
            raise CheckpointError(
                f"{self._store.url}: tag {tag!r} is on steps {steps}, because a move of it was interrupted: tag the "
                "right one again"
            )
        for record in by_number.values():
            return record
        raise NoCommit(self._unknown(tag, holds))

    def _unknown(self, tag: str, holds: Holds) -> str:
        return f"{self._store.url}: no commit is tagged {tag!r}; there are {', '.join(holds.tags) or 'no tags'}"

    def gc(self, keep: int, *, really: bool = True) -> tuple[Delete, ...]:
        """Delete the saves that are older than the newest `keep` whole commits (by names and sizes), are not pinned,
        and are of no save in flight. Returns the deletions; without `really` only those that would be made.

        Unfinished uploads are deleted too: those of fenced writers, and any that is a day old. Safe beside a run that
        owns the log: the saves that it may still commit are known by its open record's number.
        """
        if keep < 1:
            raise CheckpointError(f"keep={keep}: at least 1 commit must be kept")
        head = self._log.head()
        if head.open is None:
            return ()
        sizes = sizes_in(self._store)
        walked = list(self._with_data(head.last, sizes.keys() - pins.held_saves(self._store)))
        damaged = frozenset(r.n for r in walked if has_lost(self._store, r, sizes))
        commits = enough(walked, keep, lambda r: r.n in damaged)
        newest = owner_of(commits[0].save_id) if commits else None
        sequence = newest[1] if newest and newest[0] == head.open.n else 0
        deleted = clean(self._store, sizes, commits, keep, damaged, head.open.n, sequence, really=really)
        swept = self._sweep(head.open.n, really)
        if really:
            compactor = Compactor(self._store)
            if commits:
                kept = {r.n for r in commits}
                compactor.retire(r for r in walked if r.n not in kept)
                compactor.look(min(kept))
            compactor.run(set(sizes) - {d.save_id for d in deleted}, MAX_WALK)
        return (*deleted, *(Delete(save, UNFINISHED) for save in sorted(swept - {d.save_id for d in deleted})))

    def _sweep(self, open_n: int, really: bool) -> set[str]:
        """Remove unfinished uploads; without `really` only list them. Returns the saves of fenced writers among
        them."""
        saves = set[str]()

        def is_dead(name: str) -> bool:
            if is_fenced(name, open_n) and (save := folder_of(name)) is not None:
                saves.add(save)
                return really
            return False

        self._store.sweep_uploads(UPLOAD_SECONDS if really else math.inf, is_dead)
        return saves

    def _record(self, n: int, step: int | None) -> CommitRecord:
        record = self._log.read(n)
        match record:
            case CommitRecord() if is_compacted(record):
                raise NoCommit(_deleted(self._store.url, record))
            case CommitRecord() if step is None or record.step == step:
                return record
            case CommitRecord():
                raise NoCommit(f"{self._store.url}: record {n} is of step {record.step}, not {step}")
            case Unreadable(_, reason):
                raise CheckpointError(f"{self._store.url}: record {n} cannot be read: {reason}")
        raise NoCommit(f"{self._store.url}: record {n} is no commit; it says who opened the log")

    def _commits(self) -> Iterator[CommitRecord]:
        """The readable commits, newest first."""
        records = self._log.commits(self._log.head().last + 1)
        return (record for record in records if isinstance(record, CommitRecord))

    def _with_data(self, end: int, saves: Iterable[str]) -> Iterator[CommitRecord]:
        """The commits up to record `end` whose data may be there: see `down_to_the_last`."""
        walked = down_to_the_last(self._log.commits(end + 1), saves)
        return (record for record in walked if not is_compacted(record))

    def _held_commits(self, holds: Holds | None = None) -> Iterator[CommitRecord]:
        """The commits that a pin, tag or mark holds. A walk of the log may end before it reaches them."""
        numbers = pins.held_commits(self._store, pins.holds(self._store) if holds is None else holds)
        records = (self._log.read(n) for n in numbers)
        return (record for record in records if isinstance(record, CommitRecord))


def _deleted(url: str, record: CommitRecord) -> str:
    return f"{url}: step {record.step} (record {record.n}) was deleted, and its record is compacted"
