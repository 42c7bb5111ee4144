"""`everstep.open_commit`: a commit whose tensors are read one by one, or by slices, when they are asked for.

Invariant: nothing is written, and no byte is handed out that a checksum does not cover; so a slice costs the chunks
that it lies in, of at most 64 MiB each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import torch

from everstep.checkpoint.errors import CheckpointError, NoCommit, StateMismatch
from everstep.checkpoint.format.boxes import Box, whole
from everstep.checkpoint.format.manifest import CommitRecord, Entry
from everstep.checkpoint.load.reading import read_box
from everstep.checkpoint.load.restoring import unfit
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.opening import text_of
from everstep.checkpoint.retention.catalog import Catalog
from everstep.checkpoint.save.shard import torch_dtype
from everstep.storage import ObjectStore, RetryingStore, open_store

_NEAR: Final = 5


class LazyTensor:
    """A tensor in a commit. `tensor[2:4]` and `tensor[:, 0]` read a part of it, `tensor[...]` all of it."""

    def __init__(self, store: ObjectStore, record: CommitRecord, entry: Entry) -> None:
        self._store = store
        self._record = record
        self._entry = entry

    @property
    def shape(self) -> tuple[int, ...]:
        return self._entry.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self._entry)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self._entry.name} is a scalar: it has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The part, on the CPU. Takes integers, slices (of positive steps, as torch) and one `...`, an axis each.

        Raises `IndexError` for what lies outside, `TypeError` for any other index, `Damaged` and `StorageError`.
        """
        box, rest = _box(self._entry, index if isinstance(index, tuple) else (index,))
        return read_box(self._store, self._record, self._entry, box)[rest]


class OpenCommit:
    """A commit to read from. `step`, `n`: its step and its number in the log."""

    def __init__(self, store: ObjectStore, record: CommitRecord) -> None:
        self._store = store
        self._record = record
        self._entries = {entry.name: entry for entry in record.entries}
        self.step, self.n = record.step, record.n

    def names(self) -> tuple[str, ...]:
        """The paths of all tensors, sorted: `model/0.weight`."""
        return tuple(sorted(self._entries))

    def tensor(self, name: str) -> LazyTensor:
        """The tensor of this path; nothing is read yet. Raises `StateMismatch` if there is none."""
        if name not in self._entries:
            near = [n for n in self.names() if n.startswith(name.partition("/")[0])][:_NEAR] or self.names()[:_NEAR]
            raise StateMismatch(f"the commit of step {self.step} has no tensor {name!r}; it has {', '.join(near)}")
        return LazyTensor(self._store, self._record, self._entries[name])


def open_commit(
    url: str | os.PathLike[str] | None = None,
    *,
    step: int | None = None,
    n: int | None = None,
    start: int = 0,
    storage_options: Mapping[str, Any] | None = None,
    store: ObjectStore | None = None,
) -> OpenCommit:
    """The newest commit, that of `step`, or log record `n`, without reading any tensor and without taking the log.

        commit = everstep.open_commit("s3://bucket/run")
        rows = commit.tensor("model/weight")[10:20]

    `start`: the number of a log record that exists, where the store cannot be listed (`https://`). Shards are looked at
    when they are read. Raises `NoCommit` and `StorageError`.
    """
    if (url is None) == (store is None):
        raise CheckpointError("give the URL of a checkpoint, or store=")
    where = text_of(url) or ""
    opened = store if store is not None else RetryingStore(open_store(where, storage_options, single_committer=True))
    if step is not None or n is not None:
        return OpenCommit(opened, Catalog(opened, start).find(step, n))
    log = CommitLog(opened, start)
    for found in log.commits(log.head().last + 1):
        if isinstance(found, CommitRecord) and unfit(found) is None:
            return OpenCommit(opened, found)
    raise NoCommit(f"{opened.url}: there is no commit")


def _box(entry: Entry, index: tuple[Any, ...]) -> tuple[Box, tuple[Any, ...]]:
    """The least box that holds what is asked for, and how to take that from the box."""
    shape = entry.shape
    if ... in index:
        at = index.index(...)
        index = (*index[:at], *(slice(None),) * (len(shape) - len(index) + 1), *index[at + 1 :])
    if len(index) > len(shape):
        raise IndexError(f"{entry.name}: {len(index)} indices for a tensor of {len(shape)} axes")
    offset, sizes = list(whole(shape).offset), list(shape)
    rest: list[Any] = []
    for axis, wanted in enumerate(index):
        size = shape[axis]
        if isinstance(wanted, slice):
            first, last, stride = wanted.indices(size)
            if stride < 1:
                raise TypeError(f"{entry.name}: a slice of step {stride}; only positive steps are supported")
            offset[axis], sizes[axis] = first, max(0, last - first)
            rest.append(slice(None, None, stride))
        elif isinstance(wanted, int) and not isinstance(wanted, bool):
            if not -size <= wanted < size:
                raise IndexError(f"{entry.name}: index {wanted} on axis {axis} of size {size}")
            offset[axis], sizes[axis] = wanted % size, 1
            rest.append(0)
        else:
            raise TypeError(
                f"{entry.name}: an index of type {type(wanted).__name__}; integers, slices and ... are taken"
            )
    return Box(tuple(offset), tuple(sizes)), tuple(rest)
