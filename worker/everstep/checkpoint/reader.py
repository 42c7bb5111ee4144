"""Reads the tensors of a commit and believes nothing: every byte is checked before any of it is used.

Shards are read in chunks, several at a time; each chunk is checked as it comes. Invariant: what `load` returns is
what was saved, bit for bit, or it raises `Damaged` naming the file.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from everstep.checkpoint.errors import Damaged
from everstep.checkpoint.manifest import CommitRecord, Shard
from everstep.checkpoint.shard import assemble, check_chunk
from everstep.storage import NotFound, ObjectStore

_THREADS: Final = 4


def load(store: ObjectStore, record: CommitRecord, rank: int | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a commit by name; with a rank, those of other ranks alone (`@…`) are left out."""
    files = _files(store, record)
    mine = f"@{rank}/"
    wanted = [e for e in record.entries if rank is None or not e.name.startswith("@") or e.name.startswith(mine)]
    return {entry.name: assemble(entry, files) for entry in wanted}


def verify(store: ObjectStore, record: CommitRecord) -> tuple[str, ...]:
    """What is wrong with a commit's shards, sorted; empty if nothing is. Reads every byte, holds one chunk."""
    problems = []
    for shard in record.shards:
        try:
            _check_size(store, shard)
            for index in range(len(shard.xxh3_128)):
                _chunk(store, shard, index)
        except Damaged as e:
            problems.append(str(e))
    return tuple(sorted(problems))


def _files(store: ObjectStore, record: CommitRecord) -> list[bytearray]:
    for shard in record.shards:
        _check_size(store, shard)
    files = [bytearray(shard.bytes) for shard in record.shards]

    def fetch(position: tuple[int, int]) -> None:
        number, index = position
        shard = record.shards[number]
        start = index * shard.chunk_bytes
        data = _chunk(store, shard, index)
        files[number][start : start + len(data)] = data

    chunks = [(n, i) for n, shard in enumerate(record.shards) for i in range(len(shard.xxh3_128))]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="everstep-read") as pool:
        for _ in pool.map(fetch, chunks):
            pass
    return files


def _check_size(store: ObjectStore, shard: Shard) -> None:
    size = store.size(shard.path)
    if size is None:
        raise Damaged(f"{shard.path}: is missing")
    if size != shard.bytes:
        raise Damaged(f"{shard.path}: has {size} bytes, the manifest says {shard.bytes}")


def _chunk(store: ObjectStore, shard: Shard, index: int) -> bytes:
    start = index * shard.chunk_bytes
    try:
        data = store.get(shard.path, start, min(shard.bytes, start + shard.chunk_bytes))
    except NotFound as e:
        raise Damaged(f"{shard.path}: is missing") from e
    check_chunk(shard, index, data)
    return data
