"""Reads a chunk straight to where its bytes belong, and checks it on the same pass.

Segments are read into their places, many with one request; what lies between them, and what is too short for a place of
its own, goes through one small buffer. Each read is hashed while the processor's caches still hold it. Invariant: when
`fill` returns, all bytes that it placed are covered by a checksum that matched; when it raises, what it placed must not
be used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash

from everstep.checkpoint.errors import Damaged
from everstep.checkpoint.format.chunks import chunk_size
from everstep.checkpoint.format.manifest import Shard
from everstep.storage import NotFound, ObjectStore, Truncated

_SHORT: Final = 64 * 2**10  # below this it takes longer to pass a place on than to copy the bytes there


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
class Run:
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
        most = min(self._store.capabilities.read_size, shard.chunk_bytes)
        try:
            for runs in reads(segments, chunk_size(shard, chunk), most):
                views = [self._view(run, run.begin - runs[0].begin, most) for run in runs]
                self._store.get_into(shard.path, start + runs[0].begin, *(memoryview(view) for view in views))
                for run, view in zip(runs, views, strict=True):
                    digest.update(view)
                    self._copy(run, view)
        except NotFound as e:
            raise Damaged(f"{shard.path}: is missing") from e
        except Truncated as e:
            raise Damaged(f"{shard.path}: is shorter than the manifest says") from e
        if digest.hexdigest() != shard.xxh3_128[chunk]:
            raise Damaged(f"{shard.path}: chunk {chunk} fails its checksum: the bytes were changed")

    def _view(self, run: Run, into: int, most: int) -> Any:
        """The memory into which a run is read; without a place, `into` bytes from the spare buffer's beginning."""
        size = run.end - run.begin
        if run.place is not None:
            at = run.place.at + run.begin - run.place.begin
            return self._buffers[run.place.buffer][at : at + size]
        if len(self._spare) < most:  # once, and not larger from read to read: to touch memory costs more than to read
            self._spare = np.empty(most, dtype=np.uint8)
        return self._spare[into : into + size]

    def _copy(self, run: Run, view: Any) -> None:
        for other in run.others:
            begin, end = max(other.begin, run.begin), min(other.end, run.end)
            at = other.at + begin - other.begin
            self._buffers[other.buffer][at : at + end - begin] = view[begin - run.begin : end - run.begin]


def reads(segments: Sequence[Segment], size: int, most: int) -> Iterator[list[Run]]:
    """The reads of a chunk of `size` bytes: all of it once and in order, at most `most` bytes each, cut into runs."""
    found: list[Run] = []
    waiting = sorted(segments, key=lambda s: s.begin, reverse=True)  # the next one last
    active: list[Segment] = []  # begun, and not over: each run looks at these, not at all that there are
    for begin, end, place in _places(segments, size, min(most, _SHORT)):
        at = begin
        while at < end:
            stop = min(end, at // most * most + most)
            while waiting and waiting[-1].begin < stop:
                active.append(waiting.pop())
            active = [s for s in active if s.end > at]
            others = tuple(s for s in active if s is not place)
            found.append(Run(at, stop, place, others))
            if stop % most == 0 or stop == size:
                yield found
                found = []
            at = stop


def _places(segments: Sequence[Segment], size: int, least: int) -> Iterator[tuple[int, int, Segment | None]]:
    """The chunk's bytes as begin, end and the segment of `least` bytes or more that they are, if they are one."""
    position = 0
    for s in sorted(segments, key=lambda s: s.begin):
        if s.size >= least and s.begin >= position:
            yield position, s.begin, None
            yield s.begin, s.end, s
            position = s.end
    yield position, size, None
