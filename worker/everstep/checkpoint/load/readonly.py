"""`everstep.load`: a commit read by somebody who does not train from it: evaluation, a notebook, a converter.

Invariant: nothing is written, not even that somebody has read. So a run that has the log is not disturbed, a folder
that is mounted read-only will do, and no commit is ever suspected because of who has looked at it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from everstep.checkpoint.errors import CheckpointError, Damaged, FormatError, NoCommit, SettingUnusable, StateMismatch
from everstep.checkpoint.format.boxes import Box, whole
from everstep.checkpoint.format.manifest import CommitRecord, Entry, is_compacted
from everstep.checkpoint.format.steps import named_commit
from everstep.checkpoint.load.loading import put_into
from everstep.checkpoint.load.reading import load_whole, read_box
from everstep.checkpoint.load.restoring import SteppedOver, newest_whole, unfit
from everstep.checkpoint.load.selection import LoadReport, Selection
from everstep.checkpoint.load.targets import of_all_ranks
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.opening import text_of
from everstep.checkpoint.ranks import Alone, Ranks, join
from everstep.checkpoint.retention.catalog import Catalog
from everstep.checkpoint.save.shard import torch_dtype
from everstep.checkpoint.state.capture import capture
from everstep.checkpoint.state.holders import Holders, any_union
from everstep.checkpoint.state.tree import references, unflatten
from everstep.storage import NotFound, ObjectStore, RetryingStore, open_store

# --- opened
# `everstep.open_commit`: a commit whose tensors are read one by one, or by slices, when they are used. Invariant:
# nothing is written, and no byte is returned that a checksum does not cover. So a slice costs all chunks that it lies
# in, of at most 64 MiB each.

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
    for record in log.commits(log.head().last + 1):
        if isinstance(record, CommitRecord) and unfit(record) is None:
            return OpenCommit(opened, record)
    raise NoCommit(f"{opened.url}: there is no commit")


def _box(entry: Entry, index: tuple[Any, ...]) -> tuple[Box, tuple[Any, ...]]:
    """The smallest box that contains the indexed elements, and the index of these elements in the box."""
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


# --- readonly

log = logging.getLogger("everstep.checkpoint")

MAX_RACES: Final = 5  # commits in a row that may be deleted while they are read


@dataclass(frozen=True, slots=True)
class Loaded:
    """A commit that was read: its step and its number in the log. `state` is the mapping that was passed, filled; or
    else the commit's content: the `state_dict` of an object that has one, and any other value itself. `report`: what a
    load into a state left out."""

    step: int
    n: int
    state: Mapping[str, Any]
    report: LoadReport = field(default_factory=LoadReport)


def load(
    url: str | os.PathLike[str] | None = None,
    state: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    n: int | None = None,
    only: Iterable[str] | None = None,
    strict: bool = True,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    cast: bool = False,
    map_location: Any = None,
    start: int = 0,
    storage_options: Mapping[str, Any] | None = None,
    store: ObjectStore | None = None,
) -> Loaded:
    """Read a commit without taking the log: the newest whole one, that of `step`, or log record `n`.

        loaded = everstep.load("s3://bucket/run", {"model": model})     # filled in place
        weights = everstep.load("s3://bucket/run", only=["model"]).state["model"]

    - `url`: a folder, `file://`, `s3://`, `gs://`, `az://`; or `store`, an open store.
    - `state`: what to fill, as `Checkpointer.restore` does; keys of the commit that it does not have are left out. With
      a process group every rank calls this, and all read the same commit. Sharded modules get their part.
    - `only`, without `state`: keys, or paths of tensors in them (`"model/0.weight"`); nothing else is read.
    - `strict`, `include`, `exclude`, `rename` and `cast`, with a `state`: as for `Checkpointer.restore`.
    - `start`: the number of a log record that exists, where the store cannot be listed (`https://`).
    - `map_location`, without `state`: the device to put tensors on; else the CPU.

    Raises `NoCommit` if there is no such commit, `Damaged` if that of `step` or `n` is damaged, `StateMismatch` if it
    does not fit or has nothing of that name, and `StorageError`.
    """
    if (url is None) == (store is None):
        raise SettingUnusable("give the URL of a checkpoint, or store=")
    if state is not None and (only is not None or map_location is not None):
        raise SettingUnusable("only= and map_location= are for a load without a state, which says both itself")
    step, n = named_commit(step, n)
    selection = Selection.of(strict, include, exclude, rename, cast)
    if state is None and selection != Selection():
        raise SettingUnusable("strict=, include=, exclude=, rename= and cast= are for a load into a state; see only=")
    if isinstance(only, str):
        only = [only]
    where = text_of(url) or ""
    opened = store if store is not None else RetryingStore(open_store(where, storage_options, single_committer=True))
    for _ in range(MAX_RACES):
        try:
            return _load(opened, state, step, n, None if only is None else tuple(only), map_location, selection, start)
        except _Gone as e:
            log.info("%s: while it was read, the run that writes here has deleted it; the newest is read anew", e)
    raise SettingUnusable(
        f"{opened.url}: {MAX_RACES} commits in a row were deleted while they were read; pin one first"
    )


class _Gone(Exception):
    """The commit that was being read was deleted, and there is a newer one."""


def _load(
    store: ObjectStore,
    state: Mapping[str, Any] | None,
    step: int | None,
    n: int | None,
    only: tuple[str, ...] | None,
    map_location: Any,
    selection: Selection,
    start: int,
) -> Loaded:
    ranks: Ranks = (
        join(None, None, None) if state is not None and dist.is_available() and dist.is_initialized() else Alone()
    )
    passed: list[str] = []

    def stepped_over(n: int, reason: str, *, suspected: bool = False) -> None:
        del suspected  # load marks do not count for a reader
        passed.append(reason)
        log.error("log record %d is stepped over: %s", n, reason)

    end = -1

    def candidates() -> Iterator[CommitRecord]:
        nonlocal end
        if step is not None or n is not None:
            yield Catalog(store, start).find(step, n)
            return
        log_ = CommitLog(store, start)
        end = log_.head().last
        for record in log_.commits(end + 1):
            if passed and log_.head().last > end:
                # A newer commit exists, and the one that was read was deleted: read the newest, not an older one.
                raise CheckpointError(passed[-1])
            if isinstance(record, CommitRecord) and is_compacted(record) and passed:
                continue  # deleted, as the newer ones that were reported
            if (reason := unfit(record)) is not None:
                stepped_over(record.n, reason)
            elif isinstance(record, CommitRecord):
                yield record

    unions = ranks.world_size > 1 and any_union(state, ranks)
    captured = capture(state, ranks.rank) if state is not None else None
    if captured is not None:
        Holders().check_cuts(captured, ranks)
    try:
        if state is None or captured is None:
            record, values = _read_values(store, candidates(), only, map_location, stepped_over)
            return Loaded(record.step, record.n, values)
        wanted = partial(of_all_ranks, state, captured, ranks, unions, selection=selection)
        loaded = newest_whole(store, ranks, wanted, candidates(), stepped_over)
    except CheckpointError as e:  # on all ranks
        moved = end >= 0 and CommitLog(store, start).head().last > end
        if ranks.maximum(int(moved)) and not isinstance(e, StateMismatch):
            raise _Gone(str(e)) from e
        if (step is not None or n is not None) and passed:
            raise Damaged(f"{store.url}: {passed[-1]}") from e
        raise
    if loaded is None:
        raise NoCommit(f"{store.url}: there is no commit")
    record, tensors = loaded
    report = put_into(state, captured, record, tensors, ranks, selection, whole=False)
    return Loaded(record.step, record.n, state, report)


def _read_values(
    store: ObjectStore, candidates: Iterator[CommitRecord], only: tuple[str, ...] | None, map_location: Any,
    stepped_over: SteppedOver,
) -> tuple[CommitRecord, dict[str, Any]]:  # fmt: skip
    """The content of the first readable commit."""
    tried = False
    for record in candidates:
        tried = True
        bodies = _requested(record, only)
        names = {name for body in bodies.values() for name in references(body)}
        try:
            tensors = load_whole(store, record, names)
        except (Damaged, FormatError, NotFound) as e:
            stepped_over(record.n, str(e))
            continue
        if map_location is not None:
            tensors = {name: tensor.to(map_location) for name, tensor in tensors.items()}
        return record, {key: unflatten(body, tensors, key) for key, body in bodies.items()}
    if tried:
        raise CheckpointError(f"{store.url}: none of the commits that were tried can be read whole")
    raise NoCommit(f"{store.url}: there is no commit")


def _requested(record: CommitRecord, only: tuple[str, ...] | None) -> dict[str, Any]:
    """The encoded trees by key; with `only`, the requested parts of them, by their paths."""
    values: Any = record.values if isinstance(record.values, dict) else {}
    trees = {key: body["tree"] for key, body in values.get("state", {}).items()}
    if only is None:
        return trees
    names = {entry.name for entry in record.entries}
    requested: dict[str, Any] = {}
    for path in only:
        if path in trees:
            requested[path] = trees[path]
        elif path in names:
            requested[path] = {"$tensor": path}
        else:
            near = [name for name in sorted(names) if name.startswith(path.split("/")[0])][:5]
            raise StateMismatch(
                f"the commit of step {record.step} has no key or tensor {path!r}; it has "
                f"{', '.join(sorted(trees)) or 'nothing'}{', with ' + ', '.join(near) if near else ''}"
            )
    return requested
