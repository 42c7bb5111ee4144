"""The chunks of a shard: the units that have a checksum each, and in which shards are written, read and checked.

Knows no torch, so that the command line can verify a checkpoint without it. Invariant: bytes that do not match their
checksum are never handed on; `Damaged` names the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import xxhash

from everstep.checkpoint.errors import Damaged
from everstep.checkpoint.format.manifest import CHUNK_BYTES, CommitRecord, Shard
from everstep.storage import NotFound, ObjectStore, Truncated

T = TypeVar("T")
R = TypeVar("R")

THREADS: Final = 4
# At least so many chunks in a shard, so that readers get even shares of it; at least so many bytes in a chunk, so that
# requests are not tiny.
CHUNKS: Final = 64
MIN_CHUNK_BYTES: Final = 2**20


def chunk_bytes_for(size: int) -> int:
    """How many bytes of a shard have one checksum: a power of two times the least, and at most `CHUNK_BYTES`."""
    chunk_bytes = MIN_CHUNK_BYTES
    while chunk_bytes * CHUNKS < size and chunk_bytes < CHUNK_BYTES:
        chunk_bytes *= 2
    return chunk_bytes


def chunk_size(shard: Shard, index: int) -> int:
    """The bytes of a chunk: the last of a shard may be shorter."""
    return min(shard.chunk_bytes, shard.bytes - index * shard.chunk_bytes)


def describe(path: str, data: bytes | bytearray | memoryview) -> Shard:
    """The manifest's description of a shard with these bytes."""
    chunk_bytes = chunk_bytes_for(len(data))
    sums = tuple(xxhash.xxh3_128_hexdigest(chunk) for chunk in _cut(memoryview(data), chunk_bytes))
    return Shard(path, len(data), chunk_bytes, sums)


def read_chunk(store: ObjectStore, shard: Shard, index: int, into: memoryview) -> None:
    """Read a chunk into `into`, or through it where it is smaller. Raises `Damaged` if it is not what was written."""
    size, digest = chunk_size(shard, index), xxhash.xxh3_128()
    try:
        for at in range(0, size, max(1, len(into))):
            part = into[: size - at]
            store.get_into(shard.path, index * shard.chunk_bytes + at, part)
            digest.update(part)
    except NotFound as e:
        raise Damaged(f"{shard.path}: is missing") from e
    except Truncated as e:
        raise Damaged(f"{shard.path}: is shorter than the manifest says") from e
    if digest.hexdigest() != shard.xxh3_128[index]:
        raise Damaged(f"{shard.path}: chunk {index} fails its checksum: the bytes were changed")


def check_size(store: ObjectStore, shard: Shard) -> None:
    """Raise `Damaged` if the shard is missing, longer or shorter than the manifest says."""
    size = store.size(shard.path)
    if size is None:
        raise Damaged(f"{shard.path}: is missing")
    if size != shard.bytes:
        raise Damaged(f"{shard.path}: has {size} bytes, the manifest says {shard.bytes}")


def problems(store: ObjectStore, shard: Shard, read: Callable[[int], None] = lambda _: None) -> tuple[str, ...]:
    """The problems of a shard: none, or one text that names it. Reads every byte, and holds one chunk in memory. `read`
    is called with the bytes of each chunk."""
    try:
        check_size(store, shard)  # first: what the manifest claims is not what there is
        buffer = memoryview(bytearray(min(shard.bytes, shard.chunk_bytes, CHUNK_BYTES)))
        for index in range(len(shard.xxh3_128)):
            read_chunk(store, shard, index, buffer)
            read(chunk_size(shard, index))
    except Damaged as e:
        return (str(e),)
    return ()


def verify(store: ObjectStore, record: CommitRecord, read: Callable[[int], None] = lambda _: None) -> tuple[str, ...]:
    """The problems of a commit's shards, sorted; empty if there are none. Holds one chunk for each thread. `read` is
    called with the bytes of each chunk, by any of them."""
    by_shard = in_parallel(lambda shard: problems(store, shard, read), record.shards)
    return tuple(sorted(text for texts in by_shard for text in texts))


def in_parallel(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Do the work on a few threads; the results in order. Raises what the first item raised, when all have ended."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="everstep-io") as pool:
        return list(pool.map(work, items))


def _cut(data: memoryview, chunk_bytes: int) -> Iterator[memoryview]:
    """The chunks; one, of nothing, for an empty file."""
    for start in range(0, max(1, len(data)), chunk_bytes):
        yield data[start : start + chunk_bytes]
