"""Looks at a commit from outside of training: all of it, in one process, for people and tools.

Restoring is `restoring`'s. Invariant: what `load` returns is what was saved, bit for bit, or it raises `Damaged` naming
the file.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from everstep.checkpoint import reading
from everstep.checkpoint.boxes import whole
from everstep.checkpoint.errors import Damaged
from everstep.checkpoint.manifest import CommitRecord
from everstep.checkpoint.targets import Target
from everstep.storage import ObjectStore


def load(store: ObjectStore, record: CommitRecord, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a commit by name, whole, or those of these names."""
    asked = None if names is None else set(names)
    targets = [Target(e, whole(e.shape), False) for e in record.entries if asked is None or e.name in asked]
    plan = reading.plan(record, targets)
    buffers = reading.Buffers(plan, targets)
    reading.check_sizes(store, [record.shards[n] for n in sorted({task.shard for task in plan.own})])
    reading.fetch(store, record.shards, plan.own, buffers.bytes)
    return buffers.finish()


def verify(store: ObjectStore, record: CommitRecord) -> tuple[str, ...]:
    """What is wrong with a commit's shards, sorted; empty if nothing is. Reads every byte, holds one chunk."""
    problems = []
    for shard in record.shards:
        buffer = bytearray(min(shard.bytes, shard.chunk_bytes))
        try:
            reading.check_size(store, shard)
            for index in range(len(shard.xxh3_128)):
                size = min(shard.chunk_bytes, shard.bytes - index * shard.chunk_bytes)
                reading.read_chunk(store, shard, index, memoryview(buffer)[:size])
        except Damaged as e:
            problems.append(str(e))
    return tuple(sorted(problems))
