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

import torch.distributed as dist

from everstep.checkpoint.errors import CheckpointError, Damaged, FormatError, NoCommit, SettingUnusable, StateMismatch
from everstep.checkpoint.format.compaction import is_compacted
from everstep.checkpoint.format.manifest import CommitRecord
from everstep.checkpoint.format.steps import named_commit
from everstep.checkpoint.load.loading import put_into
from everstep.checkpoint.load.reading import load_whole
from everstep.checkpoint.load.restoring import newest_whole, unfit
from everstep.checkpoint.load.selection import LoadReport, Selection
from everstep.checkpoint.load.targets import of_all_ranks
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.opening import text_of
from everstep.checkpoint.ranks import Alone, Ranks, join
from everstep.checkpoint.retention.catalog import Catalog
from everstep.checkpoint.state.capture import capture
from everstep.checkpoint.state.holders import Holders, any_union
from everstep.checkpoint.state.tree import references, unflatten
from everstep.storage import NotFound, ObjectStore, RetryingStore, open_store

log = logging.getLogger("everstep.checkpoint")

MAX_RACES: Final = 5  # commits that may go, one after the other, while they are read


@dataclass(frozen=True, slots=True)
class Loaded:
    """A commit that was read: its step, its number in the log, and `state`: the mapping that was passed, filled, or
    what the commit holds: of an object with a `state_dict` that, of anything else its value. `report`: what was left
    out of a load into a state."""

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

    Raises `NoCommit` if there is none such, `Damaged` if what was asked for by `step` or `n` is, `StateMismatch` if it
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
        del suspected  # nobody asks here what became of other readers
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
        for found in log_.commits(end + 1):
            if passed and log_.head().last > end:
                raise CheckpointError(passed[-1])  # it went while it was read: not an older one, but the newest
            if isinstance(found, CommitRecord) and is_compacted(found) and passed:
                continue  # as deleted as those before it
            if (reason := unfit(found)) is not None:
                stepped_over(found.n, reason)
            elif isinstance(found, CommitRecord):
                yield found

    unions = ranks.world_size > 1 and any_union(state, ranks)
    captured = capture(state, ranks.rank) if state is not None else None
    if captured is not None:
        Holders().check_cuts(captured, ranks)
    try:
        if state is None or captured is None:
            record, values = _read_values(store, candidates(), only, map_location, stepped_over)
            return Loaded(record.step, record.n, values)
        wanted = partial(of_all_ranks, state, captured, ranks, unions, selection=selection)
        found = newest_whole(store, ranks, wanted, candidates(), stepped_over)
    except CheckpointError as e:  # on all ranks
        moved = end >= 0 and CommitLog(store, start).head().last > end
        if ranks.maximum(int(moved)) and not isinstance(e, StateMismatch):
            raise _Gone(str(e)) from e
        if (step is not None or n is not None) and passed:
            raise Damaged(f"{store.url}: {passed[-1]}") from e
        raise
    if found is None:
        raise NoCommit(f"{store.url}: there is no commit")
    record, tensors = found
    report = put_into(state, captured, record, tensors, ranks, selection, whole=False)
    return Loaded(record.step, record.n, state, report)


def _read_values(
    store: ObjectStore, candidates: Iterator[CommitRecord], only: tuple[str, ...] | None, map_location: Any, told: Any
) -> tuple[CommitRecord, dict[str, Any]]:
    """The content of the first readable commit."""
    tried = False
    for record in candidates:
        tried = True
        bodies = _asked(record, only)
        names = {name for body in bodies.values() for name in references(body)}
        try:
            tensors = load_whole(store, record, names)
        except (Damaged, FormatError, NotFound) as e:
            told(record.n, str(e))
            continue
        if map_location is not None:
            tensors = {name: tensor.to(map_location) for name, tensor in tensors.items()}
        return record, {key: unflatten(body, tensors, key) for key, body in bodies.items()}
    if tried:
        raise CheckpointError(f"{store.url}: none of the commits that were tried can be read whole")
    raise NoCommit(f"{store.url}: there is no commit")


def _asked(record: CommitRecord, only: tuple[str, ...] | None) -> dict[str, Any]:
    """The encoded trees by key, or the parts of them that were asked for, by the path that was said."""
    values: Any = record.values if isinstance(record.values, dict) else {}
    trees = {key: body["tree"] for key, body in values.get("state", {}).items()}
    if only is None:
        return trees
    names = {entry.name for entry in record.entries}
    found: dict[str, Any] = {}
    for path in only:
        if path in trees:
            found[path] = trees[path]
        elif path in names:
            found[path] = {"$tensor": path}
        else:
            near = [name for name in sorted(names) if name.startswith(path.split("/")[0])][:5]
            raise StateMismatch(
                f"the commit of step {record.step} has no key or tensor {path!r}; it has "
                f"{', '.join(sorted(trees)) or 'nothing'}{', with ' + ', '.join(near) if near else ''}"
            )
    return found
