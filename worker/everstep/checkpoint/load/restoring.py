"""Finds the newest commit that every rank can read whole, and steps over the others.

Rank 0 reads the log and proposes; every rank reads the shards; a commit counts only if all of them succeed, because
ranks that restore different steps would train a state that never existed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import torch
import xxhash

from everstep.checkpoint.errors import CheckpointError, Damaged, FormatError, StateMismatch
from everstep.checkpoint.format.chunks import check_size, in_parallel
from everstep.checkpoint.format.manifest import (
    CommitRecord,
    Shard,
    decode_record,
    encode_record,
    is_compacted,
    nonfinite_in,
)
from everstep.checkpoint.load import reading
from everstep.checkpoint.load.reading import exchange
from everstep.checkpoint.load.targets import Target
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.decisions import Unreadable
from everstep.checkpoint.log.loads import LoadMark
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.retention.catalog import Catalog
from everstep.checkpoint.state.finite import Nonfinite
from everstep.contract import refusal
from everstep.storage import ObjectStore, StorageError

MAX_TRIES: Final = 100

Wanted = Callable[[CommitRecord], list[Target]]  # what this rank needs of a commit

_GOOD, _DAMAGED, _BROKEN, _REFUSED = 0, 1, 2, 3


class SteppedOver(Protocol):
    """Called with the record number of a commit that is stepped over, and the reason. `suspected`: it is whole, but
    runs that loaded it died."""

    def __call__(self, n: int, reason: str, *, suspected: bool = False) -> None: ...


def unfit(record: CommitRecord | Unreadable) -> str | None:
    """Why no run may go on from this record, or None."""
    if isinstance(record, Unreadable):
        return record.reason
    if is_compacted(record):
        return f"step {record.step}: it was deleted, and its log record is compacted"
    if names := nonfinite_in(record):
        return f"step {record.step}: {', '.join(names[:3])} hold NaN or infinity"
    return None


class Guard:
    """Decides on rank 0 which readable commits are not to be loaded, and marks the one that is being loaded."""

    def __init__(self, mark: LoadMark, max_loads: int, nonfinite: Nonfinite) -> None:
        self._mark = mark
        self._most = max_loads
        self._nonfinite = nonfinite
        self._failed: dict[int, int] | None = None

    def against(self, record: CommitRecord | Unreadable) -> str | None:
        """Why this record is not to be loaded, or None."""
        if self._nonfinite != "allow" or isinstance(record, Unreadable) or is_compacted(record):
            reason = unfit(record)
            if reason is not None:
                return reason
        assert isinstance(record, CommitRecord)
        if self._most == 0:
            return None
        if self._failed is None:
            self._failed = self._mark.deaths()
        count = self._failed.get(record.n, 0)
        return (
            f"step {record.step}: {count} runs loaded it and ended without another commit"
            if count >= self._most
            else None
        )

    def loading(self, record: CommitRecord) -> None:
        if self._most:
            self._mark.mark(record.n)


def newest_whole(
    store: ObjectStore,
    ranks: Ranks,
    wanted: Wanted,
    candidates: Iterator[CommitRecord],
    stepped_over: SteppedOver,
    changes: Callable[[], None] = lambda: None,
) -> tuple[CommitRecord, dict[str, torch.Tensor]] | None:
    """The first of rank 0's `candidates` that loads on all ranks, with this rank's `wanted` tensors of it. Collective.

    `changes` is called before the first live tensor is changed. Raises `CheckpointError` if there are commits and none
    of them loads, because a start from nothing would throw the training away; and what a store raises.
    """
    for tried in range(MAX_TRIES):
        record = _propose(candidates, ranks)
        if record is None:
            if tried:
                raise CheckpointError(f"{store.url}: none of the {tried} commits that were tried can be read whole")
            return None
        try:
            return record, load(store, record, wanted, ranks, changes)
        except Damaged as e:
            stepped_over(record.n, str(e))
    raise CheckpointError(f"{store.url}: none of the newest {MAX_TRIES} commits can be read whole")


def load(
    store: ObjectStore, record: CommitRecord, wanted: Wanted, ranks: Ranks, changes: Callable[[], None]
) -> dict[str, torch.Tensor]:
    """This rank's tensors of a commit. Bytes that all ranks need are read by one of them; or by each, if they share a
    page cache: over gloo, receiving a byte was measured to cost several times the copy. Collective.

    Every rank raises if one does: `Damaged` if damage is the only problem, else another error.
    """
    problem: Exception | None = None
    targets: list[Target] = []
    todo = reading.Plan()
    try:
        targets = wanted(record)
        todo = reading.plan(record, targets)
    except (StorageError, CheckpointError) as e:
        problem = e
    # Each rank reads everything itself if ranks want different tensors, or if bytes that one rank has read cost the
    # others no more than a copy.
    alike = ranks.world_size > 1 and _agree(ranks, _digest(targets))
    together = alike and not _agree(ranks, _page_cache(store, ranks.rank))
    divided = reading.divide(todo.shared, record.shards, ranks.world_size) if together else []
    tasks = todo.own + (divided[ranks.rank] if together else todo.shared)
    if problem is None:
        try:
            in_parallel(partial(check_size, store), _to_check(record, tasks, ranks))
        except (StorageError, CheckpointError) as e:
            problem = e
    # Before any memory is taken: a record may claim more bytes than its shards have, and each rank has checked some.
    _agreed(problem, store, ranks)
    buffers = reading.Buffers(todo, targets)
    changes()
    try:
        reading.fetch(store, record.shards, tasks, buffers.bytes)
    except (StorageError, CheckpointError) as e:
        problem = e
    _agreed(problem, store, ranks)
    if together:
        exchange(divided, buffers.bytes, ranks)
    return buffers.finish()


def _agreed(problem: Exception | None, store: ObjectStore, ranks: Ranks) -> None:
    """Raise on every rank if one has a problem: `Damaged` if damage is the only problem, else another error."""
    if isinstance(problem, FormatError):
        problem = Damaged(str(problem))
    worst = ranks.maximum(_kind_of(problem))
    if worst == _DAMAGED:
        raise problem or Damaged("another rank could not read it")
    if worst != _GOOD and (problem is None or isinstance(problem, Damaged)):
        if worst == _REFUSED:
            raise StateMismatch(f"{store.url}: the state of another rank does not fit; the error of that rank says why")
        raise CheckpointError(f"{store.url}: another rank could not read the store")
    if problem is not None:
        raise problem


def _kind_of(problem: Exception | None) -> int:
    if problem is None:
        return _GOOD
    if isinstance(problem, Damaged):
        return _DAMAGED
    return _REFUSED if refusal.find(problem) is not None else _BROKEN


def _digest(targets: Sequence[Target]) -> int:
    """A number of 62 bits that identifies the shared tensors that this rank wants."""
    names = "\n".join(t.entry.name for t in targets if t.shared)
    return xxhash.xxh3_64_intdigest(names.encode("utf-8", "surrogatepass")) >> 2


def _page_cache(store: ObjectStore, rank: int) -> int:
    """A number that is equal on ranks that share a page cache: they read files, under one kernel."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_bytes() if store.url.startswith("file:") else b""
    except OSError:
        kernel = b""
    return xxhash.xxh3_64_intdigest(kernel) >> 2 if kernel else rank


def _agree(ranks: Ranks, number: int) -> bool:
    return ranks.maximum(number) == -ranks.maximum(-number)


def _to_check(record: CommitRecord, tasks: Sequence[reading.Task], ranks: Ranks) -> list[Shard]:
    """The shards whose presence and size this rank checks: those that it reads, and an even part of all."""
    mine = {task.shard for task in tasks} | set(range(ranks.rank, len(record.shards), ranks.world_size))
    return [record.shards[number] for number in sorted(mine)]


def requested_commit(catalog: Catalog, guard: Guard, step: int | None, n: int | None) -> Iterator[CommitRecord]:
    """The commit that the caller has named. It is tried although earlier runs may have died of it, and although it may
    hold NaN or infinity."""
    record = catalog.find(step, n)
    guard.loading(record)
    yield record


def candidates(
    log: CommitLog, end: Callable[[], int], guard: Guard, stepped_over: SteppedOver
) -> Iterator[CommitRecord]:
    """The commits below record `end()` to try, newest first. Those that earlier runs died of are tried only when no
    other is left."""
    passed: list[str] = []
    poison: list[tuple[CommitRecord, str]] = []
    tried = False
    deleted = 0
    for candidate in log.commits(end()):
        if isinstance(candidate, CommitRecord) and is_compacted(candidate):
            deleted += 1
            if deleted == MAX_TRIES:
                break
            if deleted > 1:
                continue  # older ones are deleted too, unless one is pinned; the first was reported
        reason = guard.against(candidate)
        if reason is None and isinstance(candidate, CommitRecord):
            for record, why in poison if not tried else ():
                stepped_over(record.n, why, suspected=True)
            tried = True
            guard.loading(candidate)
            yield candidate
        elif isinstance(candidate, CommitRecord) and not unfit(candidate):
            poison.append((candidate, str(reason)))
        else:
            passed.append(str(reason))
            stepped_over(candidate.n, str(reason))
    for record, _ in poison:
        tried = True
        guard.loading(record)
        yield record
    if passed and not tried:
        # It may have been a commit. Starting from nothing is the user's decision, not ours.
        raise CheckpointError(f"the log holds records, but no commit can be taken: {'; '.join(passed[:3])}")


def _propose(candidates: Iterator[CommitRecord], ranks: Ranks) -> CommitRecord | None:
    """Rank 0's next candidate on every rank, or None if there are no more."""
    answer, cause, record = b"", None, None
    if ranks.rank == 0:
        try:
            record = next(candidates, None)
            if ranks.world_size > 1 and record is not None:
                answer = json.dumps({"n": record.n}).encode() + b"\n" + encode_record(record)
        except (StorageError, CheckpointError) as e:
            cause = e
            answer = json.dumps({"error": str(e)}).encode() + b"\n"
    answer = ranks.from_first(answer)
    if record is not None or not answer:
        return record
    head, _, body = answer.partition(b"\n")
    header = json.loads(head)
    if "error" in header:
        raise cause or CheckpointError(f"rank 0: {header['error']}")
    proposed = decode_record(body, header["n"], "rank 0's proposal")
    assert isinstance(proposed, CommitRecord)
    return proposed
