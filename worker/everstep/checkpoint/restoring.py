"""Finds the newest commit that every rank can read whole, walking down past those that somebody cannot.

Rank 0 reads the log and proposes; every rank reads the shards; a commit counts only if all of them succeed, because
ranks that restore different steps would train a state that never existed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Final

import torch

from everstep.checkpoint import reader
from everstep.checkpoint.commitlog import CommitLog
from everstep.checkpoint.errors import CheckpointError, Damaged, FormatError
from everstep.checkpoint.log import Unreadable
from everstep.checkpoint.manifest import CommitRecord, OpenRecord, decode_record, encode_record
from everstep.checkpoint.ranks import Ranks
from everstep.storage import ObjectStore, StorageError

MAX_TRIES: Final = 100

_GOOD, _DAMAGED, _BROKEN = 0, 1, 2


def newest_whole(
    log: CommitLog,
    store: ObjectStore,
    own: OpenRecord,
    ranks: Ranks,
    stepped_over: Callable[[int, str], None],
) -> tuple[CommitRecord, dict[str, torch.Tensor]] | None:
    """The newest commit below `own` that loads on all ranks, with its tensors. Collective.

    Raises `CheckpointError` if there are commits and none of them loads: to start from nothing then would throw the
    training away; and whatever a store that does not answer raises.
    """
    candidates = _candidates(log, own, stepped_over) if ranks.rank == 0 else iter(())
    for tried in range(MAX_TRIES):
        record = _propose(candidates, ranks)
        if record is None:
            if tried:
                raise CheckpointError(f"{store.url}: none of the {tried} commits that were tried can be read whole")
            return None
        tensors, problem = _load(store, record, ranks.rank)
        worst = ranks.maximum(_GOOD if problem is None else _DAMAGED if isinstance(problem, Damaged) else _BROKEN)
        if worst == _GOOD:
            return record, tensors
        if worst == _BROKEN:
            raise problem or CheckpointError(f"{store.url}: another rank could not read the store")
        stepped_over(record.n, str(problem) if problem else "another rank could not read it")
    raise CheckpointError(f"{store.url}: none of the newest {MAX_TRIES} commits can be read whole")


def _candidates(log: CommitLog, own: OpenRecord, stepped_over: Callable[[int, str], None]) -> Iterator[CommitRecord]:
    passed: list[str] = []
    readable = False
    for found in log.commits(own.n):
        match found:
            case CommitRecord():
                readable = True
                yield found
            case Unreadable(n, reason):
                passed.append(reason)
                stepped_over(n, reason)
    if passed and not readable:
        # It may have been a commit. Starting from nothing is the user's decision, not ours.
        raise CheckpointError(f"the log holds records, but no commit can be read: {'; '.join(passed[:3])}")


def _propose(candidates: Iterator[CommitRecord], ranks: Ranks) -> CommitRecord | None:
    """Rank 0's next candidate on every rank, or None if there are no more."""
    answer, cause = b"", None
    if ranks.rank == 0:
        try:
            record = next(candidates, None)
            if record is not None:
                answer = json.dumps({"n": record.n}).encode() + b"\n" + encode_record(record)
        except (StorageError, CheckpointError) as e:
            cause = e
            answer = json.dumps({"error": str(e)}).encode() + b"\n"
    answer = ranks.from_first(answer)
    if not answer:
        return None
    head, _, body = answer.partition(b"\n")
    told = json.loads(head)
    if "error" in told:
        raise cause or CheckpointError(f"rank 0: {told['error']}")
    found = decode_record(body, told["n"], "rank 0's proposal")
    assert isinstance(found, CommitRecord)
    return found


def _load(
    store: ObjectStore, record: CommitRecord, rank: int
) -> tuple[dict[str, torch.Tensor], StorageError | CheckpointError | None]:
    try:
        return reader.load(store, record, rank), None
    except FormatError as e:
        return {}, Damaged(str(e))
    except (StorageError, CheckpointError) as e:
        return {}, e
