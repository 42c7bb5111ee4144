"""Reads the parts of a commit that ranks need into tensors: each chunk is read once, checked, and only then used.

Work is divided by chunks, the units that have a checksum. Chunks that only this rank needs it reads itself. Of the
chunks that all ranks need each rank reads an even part, and `exchange` sends it to the others. Planning does no I/O.
Invariant: the bytes of a tensor are those that were saved, or an error names the file.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import xxhash

from everstep.checkpoint.errors import Damaged
from everstep.checkpoint.format.boxes import Box, flat_begin, whole
from everstep.checkpoint.format.chunks import check_size, chunk_size, in_parallel
from everstep.checkpoint.format.manifest import CommitRecord, Entry, Piece, Shard
from everstep.checkpoint.load.targets import Target
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.save.shard import torch_dtype
from everstep.checkpoint.state.sharding import Read, reads
from everstep.storage import NotFound, ObjectStore, Truncated

# --- filling
# Reads a chunk directly into the memory of the tensors, and checks it on the same pass. Many segments are read with one
# request. Bytes between segments, and short segments, go through one small buffer. Each read is hashed while the
# processor's caches still have it. Invariant: when `fill` returns, a checksum that matched covers all bytes that it
# wrote; when it raises, these bytes must not be used.

_SHORT: Final = 64 * 2**10  # a smaller segment is copied faster from the spare buffer than read into its own memory


@dataclass(frozen=True, slots=True)
class Segment:
    """`size` bytes of a chunk from `begin`, which go to offset `at` of buffer number `buffer`."""

    begin: int
    size: int
    buffer: int
    at: int

    @property
    def end(self) -> int:
        return self.begin + self.size


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes `begin` to `end` of a chunk. They are read into the memory of `segment`, or without one into the spare
    buffer, and copied from there to `others`."""

    begin: int
    end: int
    segment: Segment | None
    others: tuple[Segment, ...]


class Filler:
    """Fills buffers with chunks, one after another. Each thread has its own."""

    def __init__(self, store: ObjectStore, buffers: Sequence[Any]) -> None:
        self._store = store
        self._buffers = buffers
        self._spare = np.empty(0, dtype=np.uint8)

    def fill(self, shard: Shard, chunk: int, segments: Sequence[Segment]) -> None:
        """Read a chunk, check it and fill its segments. Raises `Damaged` naming the file, or what the store raises."""
        start, digest = chunk * shard.chunk_bytes, xxhash.xxh3_128()
        most = min(self._store.capabilities.read_size, shard.chunk_bytes)
        try:
            for runs in reads_into(segments, chunk_size(shard, chunk), most):
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
        """The memory into which a run is read: its segment's, or else the spare buffer from offset `into` on."""
        size = run.end - run.begin
        if run.segment is not None:
            at = run.segment.at + run.begin - run.segment.begin
            return self._buffers[run.segment.buffer][at : at + size]
        if len(self._spare) < most:  # allocated once, in full size: the first use of memory costs more than reading
            self._spare = np.empty(most, dtype=np.uint8)
        return self._spare[into : into + size]

    def _copy(self, run: Run, view: Any) -> None:
        for other in run.others:
            begin, end = max(other.begin, run.begin), min(other.end, run.end)
            at = other.at + begin - other.begin
            self._buffers[other.buffer][at : at + end - begin] = view[begin - run.begin : end - run.begin]


def reads_into(segments: Sequence[Segment], size: int, most: int) -> Iterator[list[Run]]:
    """The reads of a chunk of `size` bytes: all of it once and in order, at most `most` bytes each, cut into runs."""
    runs: list[Run] = []
    waiting = sorted(segments, key=lambda s: s.begin, reverse=True)  # the next one last
    active: list[Segment] = []  # segments that have begun and not ended: a run copies to these only
    for begin, end, segment in _spans(segments, size, min(most, _SHORT)):
        at = begin
        while at < end:
            stop = min(end, at // most * most + most)
            while waiting and waiting[-1].begin < stop:
                active.append(waiting.pop())
            active = [s for s in active if s.end > at]
            others = tuple(s for s in active if s is not segment)
            runs.append(Run(at, stop, segment, others))
            if stop % most == 0 or stop == size:
                yield runs
                runs = []
            at = stop


def _spans(segments: Sequence[Segment], size: int, least: int) -> Iterator[tuple[int, int, Segment | None]]:
    """The chunk divided into spans: begin, end, and the segment that the span is. None for bytes between segments, and
    for segments of less than `least` bytes or that overlap the one before."""
    position = 0
    for s in sorted(segments, key=lambda s: s.begin):
        if s.size >= least and s.begin >= position:
            yield position, s.begin, None
            yield s.begin, s.end, s
            position = s.end
    yield position, size, None


# --- exchange
# Sends the bytes that each rank has read to all others, over the process group, in messages of bounded size. Every rank
# derives the same messages from the same plan, so only the bytes are sent. Memory: a few messages beside the tensors
# themselves. Large runs are sent from the tensors' own memory, and received into it.

MESSAGE: Final = 32 * 2**20
PACKED: Final = 2**20  # runs below this share a message
WINDOW: Final = 4  # messages in flight at once


def exchange(divided: Sequence[Sequence[Task]], buffers: Sequence[Any], ranks: Ranks) -> None:
    """Before the call, the bytes of `divided[r]` are in rank r's buffers; after it, those of every task are on every
    rank.

    Collective: every rank passes the same tasks. Raises what the process group raises.
    """
    under_way: deque[tuple[Any, Any, list[Any]]] = deque()
    for source, tasks in enumerate(divided):
        for runs in _messages(tasks, buffers):
            if len(under_way) == WINDOW:
                _arrived(*under_way.popleft())
            whole = runs[0] if len(runs) == 1 else np.concatenate(runs)
            mine = source == ranks.rank
            under_way.append((ranks.broadcast(torch.from_numpy(whole), source), whole, [] if mine else runs))
    while under_way:
        _arrived(*under_way.popleft())


def _arrived(work: Any, whole: Any, runs: list[Any]) -> None:
    work.wait()
    if len(runs) > 1:
        at = 0
        for run in runs:
            run[:] = whole[at : at + len(run)]
            at += len(run)


def _messages(tasks: Sequence[Task], buffers: Sequence[Any]) -> Iterator[list[Any]]:
    """The runs of bytes of each message: one large one, or several small ones."""
    packed: list[Any] = []
    size = 0
    for buffer, begin, end in _runs(tasks):
        if end - begin < PACKED:
            packed.append(buffers[buffer][begin:end])
            size += end - begin
            if size >= PACKED:
                yield packed
                packed, size = [], 0
            continue
        for at in range(begin, end, MESSAGE):
            yield [buffers[buffer][at : min(end, at + MESSAGE)]]
    if packed:
        yield packed


def _runs(tasks: Sequence[Task]) -> Iterator[tuple[int, int, int]]:
    """The tasks' segments as buffer, begin, end; neighbours are joined."""
    last: tuple[int, int, int] | None = None
    for task in tasks:
        for s in task.segments:
            if last is not None and last[0] == s.buffer and last[2] == s.at:
                last = (s.buffer, last[1], s.at + s.size)
                continue
            if last is not None:
                yield last
            last = (s.buffer, s.at, s.at + s.size)
    if last is not None:
        yield last


# --- reading


@dataclass(frozen=True, slots=True)
class Task:
    """One chunk of one shard, and where its bytes go."""

    shard: int
    chunk: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """A buffer that holds rows of a piece. Their box `source` is copied to `box` of a target's tensor."""

    buffer: int
    rows: tuple[int, ...]
    source: Box
    target: int
    box: Box


@dataclass(slots=True)
class Plan:
    """The tasks of a load. Buffers are the targets' tensors in order, then those of the folds."""

    sizes: list[int] = field(default_factory=list)
    own: list[Task] = field(default_factory=list)
    shared: list[Task] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)


def plan(record: CommitRecord, targets: Sequence[Target]) -> Plan:
    """The tasks for these targets. Ranks with the same shared targets get the same shared tasks."""
    result = Plan([t.box.elements * torch_dtype(t.entry).itemsize for t in targets])
    segments: dict[bool, dict[tuple[int, int], list[Segment]]] = {False: {}, True: {}}
    for number, target in enumerate(targets):
        width = torch_dtype(target.entry).itemsize
        for read in reads(target.entry, target.box) if target.box.elements else ():
            piece = target.entry.pieces[read.piece]
            if not read.source.elements:
                continue
            begin, size, buffer, at = _landing(result, read, piece, number, target, width)
            _cut(record.shards[piece.shard], piece.shard, begin, size, buffer, at, segments[target.shared])
    for wanted, tasks in ((False, result.own), (True, result.shared)):
        tasks += [Task(*key, tuple(parts)) for key, parts in sorted(segments[wanted].items())]
    return result


def _landing(
    result: Plan, read: Read, piece: Piece, number: int, target: Target, width: int
) -> tuple[int, int, int, int]:
    """The bytes of the shard that a read needs, as begin and size, and the number of their buffer and offset in it."""
    begin = flat_begin(piece.shape, read.source)
    at = flat_begin(target.box.shape, read.target)
    if begin is not None and at is not None:
        return piece.begin + begin * width, read.source.elements * width, number, at * width
    # It is not one run of bytes on both sides. So its rows are read into a buffer of their own, and copied at the end.
    rows = (read.source.shape[0], *piece.shape[1:])
    source = Box((0, *read.source.offset[1:]), read.source.shape)
    row = math.prod(piece.shape[1:]) * width
    result.sizes.append(rows[0] * row)
    result.folds.append(Fold(len(result.sizes) - 1, rows, source, number, read.target))
    return piece.begin + read.source.offset[0] * row, rows[0] * row, len(result.sizes) - 1, 0


def _cut(
    shard: Shard, number: int, begin: int, size: int, buffer: int, at: int,
    segments: dict[tuple[int, int], list[Segment]],
) -> None:  # fmt: skip
    """Cut a run of bytes at the borders of the shard's chunks."""
    end = begin + size
    while begin < end:
        chunk, into = divmod(begin, shard.chunk_bytes)
        count = min(end - begin, shard.chunk_bytes - into)
        segments.setdefault((number, chunk), []).append(Segment(into, count, buffer, at))
        begin, at = begin + count, at + count


def divide(tasks: Sequence[Task], shards: Sequence[Shard], parts: int) -> list[list[Task]]:
    """The tasks divided among `parts` ranks, evenly by bytes; each rank gets neighbouring ones. At the world size that
    saved a replicated state, each rank gets the shard that it wrote."""
    sizes = [chunk_size(shards[t.shard], t.chunk) for t in tasks]
    total, position = sum(sizes), 0
    divided: list[list[Task]] = [[] for _ in range(parts)]
    for task, size in zip(tasks, sizes, strict=True):
        divided[min(parts - 1, (2 * position + size) * parts // max(1, 2 * total))].append(task)
        position += size
    return divided


class Buffers:
    """The memory that a plan's bytes are read into: that of the live tensors where possible, else new memory."""

    def __init__(self, plan: Plan, targets: Sequence[Target]) -> None:
        self.tensors = [
            torch.empty(t.box.shape, dtype=torch_dtype(t.entry)) if t.memory is None else t.memory for t in targets
        ]
        self.bytes = [_bytes_of(t) for t in self.tensors]
        self.bytes += [np.empty(size, dtype=np.uint8) for size in plan.sizes[len(targets) :]]
        self._folds = plan.folds
        self._targets = targets

    def finish(self) -> dict[str, torch.Tensor]:
        """The tensors by name, after all bytes were read."""
        for fold in self._folds:
            into = self.tensors[fold.target]
            rows = torch.from_numpy(self.bytes[fold.buffer]).view(into.dtype).view(fold.rows)
            into[fold.box.slices] = rows[fold.source.slices]
            self.bytes[fold.buffer] = np.empty(0, dtype=np.uint8)
        return {t.entry.name: t.finish(tensor) for t, tensor in zip(self._targets, self.tensors, strict=True)}


def fetch(store: ObjectStore, shards: Sequence[Shard], tasks: Iterable[Task], buffers: Sequence[Any]) -> None:
    """Read and check the chunks of `tasks`, and fill their segments. Raises `Damaged` or `StorageError`."""
    threads = threading.local()

    def fill(task: Task) -> None:
        if not hasattr(threads, "filler"):
            threads.filler = Filler(store, buffers)
        threads.filler.fill(shards[task.shard], task.chunk, task.segments)

    in_parallel(fill, tasks)


def load_whole(store: ObjectStore, record: CommitRecord, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """All tensors of a commit, or those in `names`, by name. Each is read whole, in this process alone."""
    chosen = None if names is None else set(names)
    wanted = [Target(e, whole(e.shape), False) for e in record.entries if chosen is None or e.name in chosen]
    return _read(store, record, wanted)


def read_box(store: ObjectStore, record: CommitRecord, entry: Entry, box: Box) -> torch.Tensor:
    """A box of one tensor, of the box's shape. Raises `Damaged` and `StorageError`."""
    return _read(store, record, [Target(entry, box, False)])[entry.name]


def _read(store: ObjectStore, record: CommitRecord, wanted: Sequence[Target]) -> dict[str, torch.Tensor]:
    todo = plan(record, wanted)
    # Before any memory is taken: a record may claim more bytes than its shards have.
    in_parallel(partial(check_size, store), [record.shards[n] for n in sorted({task.shard for task in todo.own})])
    buffers = Buffers(todo, wanted)
    fetch(store, record.shards, todo.own, buffers.bytes)
    return buffers.finish()


def _bytes_of(tensor: torch.Tensor) -> Any:
    if not tensor.numel():
        return np.empty(0, dtype=np.uint8)
    row = tensor.as_strided((tensor.numel(),), (1,))  # an axis of one element may have any stride
    return row.view(torch.uint8).numpy()
