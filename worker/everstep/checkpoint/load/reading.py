"""Brings what ranks need of a commit into tensors: each chunk is read once, checked, and only then used.

Work is divided by chunks, the units that have a checksum. What only this rank needs it reads itself; what all ranks
need is read by one of them, each an even part, and `exchange` brings it to the others. Planning does no I/O. Invariant:
the bytes of a tensor are those that were saved, or an error names the file.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from everstep.checkpoint.format.boxes import Box, flat_begin, whole
from everstep.checkpoint.format.chunks import check_size, chunk_size, in_parallel
from everstep.checkpoint.format.manifest import CommitRecord, Entry, Piece, Shard
from everstep.checkpoint.load.filling import Filler, Segment
from everstep.checkpoint.load.targets import Target
from everstep.checkpoint.save.shard import torch_dtype
from everstep.checkpoint.state.sharding import Read, reads
from everstep.storage import ObjectStore


@dataclass(frozen=True, slots=True)
class Task:
    """One chunk of one shard, and where its bytes go."""

    shard: int
    chunk: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """A buffer that holds rows of a piece, of which a box goes to a box of a target's tensor."""

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
    """The tasks for these targets; the shared ones are the same on every rank whose shared targets are."""
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
        tasks += [Task(*key, tuple(found)) for key, found in sorted(segments[wanted].items())]
    return result


def _landing(
    result: Plan, read: Read, piece: Piece, number: int, target: Target, width: int
) -> tuple[int, int, int, int]:
    """The bytes of the shard that a read needs, as begin and size, and the buffer and place where they land."""
    begin = flat_begin(piece.shape, read.source)
    at = flat_begin(target.box.shape, read.target)
    if begin is not None and at is not None:
        return piece.begin + begin * width, read.source.elements * width, number, at * width
    # Not one run of bytes on both sides: the rows that hold it are kept until they are complete, then copied.
    rows = (read.source.shape[0], *piece.shape[1:])
    source = Box((0, *read.source.offset[1:]), read.source.shape)
    row = math.prod(piece.shape[1:]) * width
    result.sizes.append(rows[0] * row)
    result.folds.append(Fold(len(result.sizes) - 1, rows, source, number, read.target))
    return piece.begin + read.source.offset[0] * row, rows[0] * row, len(result.sizes) - 1, 0


def _cut(
    shard: Shard, number: int, begin: int, size: int, buffer: int, at: int,
    found: dict[tuple[int, int], list[Segment]],
) -> None:  # fmt: skip
    """Cut a run of bytes at the borders of the shard's chunks."""
    end = begin + size
    while begin < end:
        chunk, into = divmod(begin, shard.chunk_bytes)
        count = min(end - begin, shard.chunk_bytes - into)
        found.setdefault((number, chunk), []).append(Segment(into, count, buffer, at))
        begin, at = begin + count, at + count


def divide(tasks: Sequence[Task], shards: Sequence[Shard], parts: int) -> list[list[Task]]:
    """Neighbouring tasks to each of `parts` ranks, even by bytes to read. At the world size that saved a replicated
    state, each rank gets the shard that it wrote."""
    sizes = [chunk_size(shards[t.shard], t.chunk) for t in tasks]
    total, position = sum(sizes), 0
    divided: list[list[Task]] = [[] for _ in range(parts)]
    for task, size in zip(tasks, sizes, strict=True):
        divided[min(parts - 1, (2 * position + size) * parts // max(1, 2 * total))].append(task)
        position += size
    return divided


class Buffers:
    """The memory that a plan's bytes land in: the live tensors' own where it may be, else new."""

    def __init__(self, plan: Plan, targets: Sequence[Target]) -> None:
        self.tensors = [
            torch.empty(t.box.shape, dtype=torch_dtype(t.entry)) if t.memory is None else t.memory for t in targets
        ]
        self.bytes = [_bytes_of(t) for t in self.tensors]
        self.bytes += [np.empty(size, dtype=np.uint8) for size in plan.sizes[len(targets) :]]
        self._folds = plan.folds
        self._targets = targets

    def finish(self) -> dict[str, torch.Tensor]:
        """The tensors by name, once all bytes have landed."""
        for fold in self._folds:
            into = self.tensors[fold.target]
            rows = torch.from_numpy(self.bytes[fold.buffer]).view(into.dtype).view(fold.rows)
            into[fold.box.slices] = rows[fold.source.slices]
            self.bytes[fold.buffer] = np.empty(0, dtype=np.uint8)
        return {t.entry.name: t.finish(tensor) for t, tensor in zip(self._targets, self.tensors, strict=True)}


def fetch(store: ObjectStore, shards: Sequence[Shard], tasks: Iterable[Task], buffers: Sequence[Any]) -> None:
    """Read, check and place the chunks of `tasks`. Raises `Damaged` or `StorageError`."""
    threads = threading.local()

    def one(task: Task) -> None:
        if not hasattr(threads, "filler"):
            threads.filler = Filler(store, buffers)
        threads.filler.fill(shards[task.shard], task.chunk, task.segments)

    in_parallel(one, tasks)


def load_whole(store: ObjectStore, record: CommitRecord, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a commit by name, or those of these names: all of each, in this process alone."""
    asked = None if names is None else set(names)
    wanted = [Target(e, whole(e.shape), False) for e in record.entries if asked is None or e.name in asked]
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
