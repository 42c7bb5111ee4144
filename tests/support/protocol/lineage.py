"""What a log must look like at every moment: the invariants of training state, as functions of the bare facts.

It knows nothing of writers' phases or messages: only of records, of shards that are durable, and of which saves were
damaged from outside or retired by retention.
"""

from __future__ import annotations

from typing import NamedTuple

from everstep.checkpoint.format.manifest import NONE, CommitRecord, OpenRecord, Record, is_compacted


class Shard(NamedTuple):
    save: str
    part: int
    author: str  # ghost: the writer whose bytes it holds


class Deleted(NamedTuple):
    """The place of a record that was deleted, with COMPACT_IN_PLACE off. The store has nothing there."""

    n: int


class Damaged(NamedTuple):
    """A record of which nobody can read a byte. What it was is a ghost."""

    was: Record


Log = tuple[Record | Deleted | Damaged | None, ...]


def whole(commit: CommitRecord, shards: frozenset[Shard]) -> bool:
    """Whether the commit's shards are all there and named, and all of the writer that committed them."""
    return not is_compacted(commit) and all(
        Shard(commit.save_id, part, commit.writer) in shards for part in range(commit.world_size)
    )


def commits_below(log: Log, n: int) -> list[CommitRecord]:
    return [r for r in log[:n] if isinstance(r, CommitRecord)]


def broken(log: Log, shards: frozenset[Shard], gone: frozenset[str]) -> str | None:
    """The first thing wrong with this log, or None. `gone`: saves whose shards are rightly or forcibly missing."""
    owner: OpenRecord | None = None
    before: CommitRecord | None = None
    lost_by: dict[str, str] = {}  # job → the job that took the log from it
    for n, found in enumerate(log):
        record = found.was if isinstance(found, Damaged) else found
        if isinstance(found, Damaged) and isinstance(record, CommitRecord):
            continue  # lost, by a fault
        match record:
            case Deleted():
                continue
            case None:
                return f"the log has a gap at {n}"
            case OpenRecord():
                wrong = _wrong_open(record, owner, lost_by)
                if owner is not None and owner.job_uid != record.job_uid:
                    lost_by[owner.job_uid] = record.job_uid
                owner = record
            case CommitRecord():
                wrong = _wrong_commit(record, owner, before, commits_below(log, n), shards, gone)
                before = record
        if wrong is not None:
            return wrong
    return None


def _wrong_open(record: OpenRecord, owner: OpenRecord | None, lost_by: dict[str, str]) -> str | None:
    if owner is not None and owner.job_uid == record.job_uid and record.round < owner.round:
        return f"round {record.round} opened at {record.n} after round {owner.round}: the newer round is fenced"
    if record.job_uid in lost_by:
        return f"job {record.job_uid} opened at {record.n} although job {lost_by[record.job_uid]} had taken over"
    return None


def _wrong_commit(
    record: CommitRecord,
    owner: OpenRecord | None,
    before: CommitRecord | None,
    earlier: list[CommitRecord],
    shards: frozenset[Shard],
    gone: frozenset[str],
) -> str | None:
    n = record.n
    if record.save_id not in gone and not whole(record, shards):
        return f"commit {n} is torn: not all shards of save {record.save_id} are those of its writer"
    if owner is None or owner.writer != record.writer:
        return f"writer {record.writer} committed {n} although {owner.writer if owner else 'nobody'} owns the log"
    if any((c.writer, c.step) == (record.writer, record.step) for c in earlier):
        return f"save {record.save_id} was committed twice"
    if before is not None and before.writer == record.writer and before.open == record.open:
        # Its own training went on from the state of its earlier saves, whether it knew them committed or not.
        return None if before.step < record.step else f"commit {n} goes back behind commit {before.n}"
    base = _base(record)
    skipped = [c for c in earlier if c.n > base and c.save_id not in gone]
    if skipped or base >= n:
        return f"fork: commit {n} descends from commit {base}, past commit {skipped[-1].n if skipped else base}"
    return None


def _base(record: CommitRecord) -> int:
    return record.values if isinstance(record.values, int) else NONE
