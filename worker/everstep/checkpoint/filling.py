"""Reads a chunk straight to where its bytes belong, and checks it on the same pass.

Long segments are read into their place; what lies between them goes through one small buffer. Each read is hashed while
the processor's caches still hold it. Invariant: when `fill` returns, all bytes that it placed are covered by a checksum
that matched; when it raises, what it placed must not be used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from everstep.checkpoint.chunks import chunk_size
from everstep.checkpoint.errors import Damaged
from everstep.checkpoint.manifest import Shard
from everstep.storage import NotFound, ObjectStore, Truncated


@dataclass(frozen=True, slots=True)
class Segment:
    """`size` bytes of a chunk from `begin`, which belong at `at` of buffer number `buffer`."""

    begin: int
    size: int
    buffer: int
    at: int

    @property
    def end(self) -> int:
        return self.begin + self.size


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes `begin` to `end` of a chunk, read into `place` if there is one, and copied from there to `others`."""

    begin: int
    end: int
    place: Segment | None
    others: tuple[Segment, ...]


class Filler:
    """Fills buffers with chunks, one after another. Each thread has its own."""

    def __init__(self, store: ObjectStore, buffers: Sequence[Any]) -> None:
        self._store = store
        self._buffers = buffers
        self._spare = np.empty(0, dtype=np.uint8)

    def fill(self, shard: Shard, chunk: int, segments: Sequence[Segment]) -> None:
        """Read a chunk, check it and place its segments. Raises `Damaged` naming the file, or what the store raises."""
        start, digest = chunk * shard.chunk_bytes, xxhash.xxh3_128()
        try:
            for read in reads(segments, chunk_size(shard, chunk), self._store.capabilities.read_size):
                view = self._view(read, shard.chunk_bytes)
                self._store.get_into(shard.path, start + read.begin, memoryview(view))
                digest.update(view)
                for other in read.others:
                    begin, end = max(other.begin, read.begin), min(other.end, read.end)
                    at = other.at + begin - other.begin
                    self._buffers[other.buffer][at : at + end - begin] = view[begin - read.begin : end - read.begin]
        except NotFound as e:
            raise Damaged(f"{shard.path}: is missing") from e
        except Truncated as e:
            raise Damaged(f"{shard.path}: is shorter than the manifest says") from e
        if digest.hexdigest() != shard.xxh3_128[chunk]:
            raise Damaged(f"{shard.path}: chunk {chunk} fails its checksum: the bytes were changed")

    def _view(self, read: Read, most: int) -> Any:
        size = read.end - read.begin
        if read.place is not None:
            at = read.place.at + read.begin - read.place.begin
            return self._buffers[read.place.buffer][at : at + size]
        if len(self._spare) < size:  # once, and not larger from read to read: to touch memory costs more than to read
            self._spare = np.empty(max(size, min(self._store.capabilities.read_size, most)), dtype=np.uint8)
        return self._spare[:size]


def reads(segments: Sequence[Segment], size: int, most: int) -> Iterator[Read]:
    """The reads of a chunk of `size` bytes: all of it once and in order, at most `most` bytes each."""
    position = 0
    for s in sorted(segments, key=lambda s: s.begin):
        # A request costs more than to copy the bytes of a short segment, and it is the store that says what is short.
        if s.size >= most and s.begin >= position:
            yield from _cut(position, s.begin, None, segments, most)
            yield from _cut(s.begin, s.end, s, segments, most)
            position = s.end
    yield from _cut(position, size, None, segments, most)


def _cut(begin: int, end: int, place: Segment | None, segments: Sequence[Segment], most: int) -> Iterator[Read]:
    for at in range(begin, end, most):
        stop = min(end, at + most)
        yield Read(at, stop, place, tuple(s for s in segments if s is not place and s.begin < stop and s.end > at))
