"""A commit copied into another store as the beginning of a log of its own, so that a run can go on from it there.

Knows no torch. Invariant: the target holds nothing, or a whole checkpoint; each chunk is checked on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.chunks import check_size, chunk_size, in_parallel, read_chunk
from everstep.checkpoint.format.layout import save_id
from everstep.checkpoint.format.manifest import NONE, CommitRecord, Shard
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.retention.late_metrics import all_metrics
from everstep.storage import ObjectStore


def copy(
    source: ObjectStore,
    record: CommitRecord,
    target: ObjectStore,
    writer: str,
    at: str,
    copied: Callable[[int], None] = lambda _: None,
) -> CommitRecord:
    """Copy a commit; the new record. `writer` is 32 new hex digits, `at` the time as RFC 3339. `copied` is called with
    the bytes of each chunk, by any of a few threads.

    Raises `CheckpointError` if the target has a log already, `Damaged` if the commit is, and `StorageError`.
    """
    log = CommitLog(target)
    log.unbegun()
    for shard in record.shards:
        check_size(source, shard)
    identifier = save_id(0, writer, 1)

    def bring(shard: Shard) -> Shard:
        moved = replace(shard, path=f"data/{identifier}/{shard.path.rsplit('/', 1)[1]}")
        buffer = bytearray(min(shard.bytes, shard.chunk_bytes))
        with target.open_write(moved.path, shard.bytes) as into:
            for index in range(len(shard.xxh3_128)):
                chunk = memoryview(buffer)[: chunk_size(shard, index)]
                read_chunk(source, shard, index, chunk)
                into.write(chunk)
                copied(len(chunk))
            into.commit()
        return moved

    names = [shard.path.rsplit("/", 1)[1] for shard in record.shards]
    if len(set(names)) < len(names):
        raise CheckpointError(f"{source.url}: record {record.n} has shards of several saves; it cannot be copied")
    values = dict(record.values) if isinstance(record.values, dict) else {}
    if metrics := all_metrics(source, record):
        values["metrics"] = dict(metrics)  # of the new record, what was known only after the save too
    shards = tuple(in_parallel(bring, record.shards))
    draft = replace(
        record,
        n=NONE,
        writer=writer,
        round=0,
        job_uid="",
        save_id=identifier,
        at=at,
        open=NONE,
        commit=NONE,
        shards=shards,
        values=values,
    )
    return log.begin(writer, draft)
