"""Metrics of a commit that are known only after its save: an evaluation of the state of step N ends after the save of
step N has begun, and its result belongs to that commit.

A commit's record never changes, so such metrics are an object beside the shards, which goes with them. Only rank 0
writes it. An evaluation that lost a peer is repeated in another world, or after a restart: its metrics go to the newest
commit, if that is of its step. Invariant: a metric is only put beside the commit of the state that it belongs to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final

from everstep.checkpoint.errors import CheckpointError, FormatError
from everstep.checkpoint.format import wire
from everstep.checkpoint.format.complete import read_complete
from everstep.checkpoint.format.layout import metrics_name
from everstep.checkpoint.format.manifest import VERSION, CommitRecord, is_compacted
from everstep.checkpoint.handle import Committed, SaveHandle
from everstep.checkpoint.keep import Keep, metrics_of
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.storage import NotFound, ObjectStore

log = logging.getLogger("everstep.checkpoint")

Later = Callable[[Callable[[], None]], object]  # does something on the writer's thread, after what is in flight

_MOST: Final = 64  # saves that still accept metrics


class LateMetrics:
    """The newest saves of a run, and the metrics of each of them so far."""

    def __init__(self, store: ObjectStore, keep: Keep) -> None:
        self._store = store
        self._keep = keep
        self._saves: dict[int, tuple[SaveHandle, dict[str, float]]] = {}  # by step
        self._later: dict[int, dict[str, float]] = {}  # the metrics that were added after the save, by step
        self._rank = 0
        self._has_warned = False  # about a commit without the metric by which the best are kept
        # The step of the commit that this world goes on from; -1 if there is none, None if this process does not know.
        self._standing: int | None = -1
        self._restored_id: str | None = None  # the id of that commit's save; None if it is the newest commit
        self._waiting: Callable[[], None] | None = None  # a task for the time when the log is taken again

    def saved(self, handle: SaveHandle, metrics: Mapping[str, float]) -> SaveHandle:
        """A save has begun with these metrics, or failed at once. Returns its handle."""
        if self._standing is None:
            self._standing = -1
        self._saves.pop(handle.step, None)
        self._later.pop(handle.step, None)
        self._saves[handle.step] = handle, dict(metrics)
        while len(self._saves) > _MOST:
            oldest = list(self._saves)[0]  # noqa: RUF015 - at once: a handler of signals may save in between
            self._saves.pop(oldest, None)
            self._later.pop(oldest, None)
        return handle

    def move(self, rank: int) -> None:
        """The world has changed, and this process has this rank now. A save in flight may never be committed."""
        self._rank = rank
        if self._saves:
            self._standing, self._restored_id = next(reversed(self._saves)), None
        elif self._standing == -1:  # a process that joins has not seen the save, and may be rank 0 now
            self._standing = None
        self._saves.clear()
        self._later.clear()

    def restored(self, record: CommitRecord | None, rank: int) -> None:
        """This process, of this rank, has restored the commit."""
        self._rank = rank
        self._standing, self._restored_id = (-1, None) if record is None else (record.step, record.save_id)
        self._waiting = None
        saved = self._saves.get(record.step) if record is not None else None
        if record is not None and (saved is None or saved[0].save_id != record.save_id):
            # This run has saved the same step in another save. Metrics that are added now belong to the loaded commit.
            self._saves.pop(record.step, None)
            self._later.pop(record.step, None)

    def knows(self, step: int) -> bool:
        """Whether metrics of this step can be added."""
        return step in self._saves or self._standing in (step, None)

    def taken(self, later: Later) -> None:
        """The log is taken: run the waiting task by `later`, which does it before the next save."""
        task, self._waiting = self._waiting, None
        if task is not None:
            later(task)

    def check(self, rank: int, *, by_session: bool) -> None:
        """The next save begins: warn, once, if the one before lacks the metric by which the best are kept."""
        if rank or self._has_warned or not self._saves:
            return
        handle, metrics = next(reversed(self._saves.values()))
        if self._keep.lacks(metrics):
            self._has_warned = True
            log.warning("step %d: %s", handle.step, self._keep.advice(by_session=by_session))

    def add(self, step: int, metrics: Mapping[str, float], later: Later | None) -> None:
        """Add metrics of the state after `step`. Rank 0 puts them beside the commit by `later`, after the save; without
        `later`, by that of `taken`.

        Raises `CheckpointError` for a step that is not among the newest saves.
        """
        if not self.knows(step):
            known = ", ".join(map(str, self._saves)) or "none"
            raise CheckpointError(
                f"add_metrics({step}): no save of this step is among the newest of this run (of steps {known}). "
                "Call it after save() of the same step"
            )
        added = self._later.setdefault(step, {})
        added.update(metrics)
        if not metrics:
            return
        if step not in self._saves:
            self._standing = step
            if self._rank == 0:
                self._waiting = partial(_put_beside_older, self._store, step, self._restored_id, dict(added))
                if later is not None:
                    self.taken(later)
            return
        handle, given = self._saves[step]
        given.update(metrics)
        if later is not None:
            later(partial(_put, self._store, handle, dict(added)))


def _put(store: ObjectStore, handle: SaveHandle, metrics: Mapping[str, float]) -> None:
    if isinstance(handle.outcome, Committed):
        body: dict[str, wire.Json] = {"version": VERSION, "metrics": dict(metrics)}
        store.put(metrics_name(handle.save_id), wire.encode(body))


def _put_beside_older(store: ObjectStore, step: int, save_id: str | None, metrics: Mapping[str, float]) -> None:
    """Put metrics beside a commit that another world of this run, or another run, has made. That world may have ended
    before it made the commit."""
    if save_id is None:
        log_ = CommitLog(store)
        newest = next((r for r in log_.commits(log_.head().last + 1) if isinstance(r, CommitRecord)), None)
        if newest is None or newest.step != step or is_compacted(newest):
            return
        save_id = newest.save_id
    merged = {**_read(store, save_id, absent=logging.DEBUG), **metrics}
    store.put(metrics_name(save_id), wire.encode({"version": VERSION, "metrics": dict(merged)}))


def later_metrics(store: ObjectStore, save_id: str, listed: Collection[str]) -> dict[str, float]:
    """The metrics that were put beside a save whose objects are `listed`. Raises `StorageError`."""
    return _read(store, save_id, absent=logging.WARNING) if metrics_name(save_id) in listed else {}


def all_metrics(store: ObjectStore, record: CommitRecord) -> dict[str, float]:
    """The metrics of one commit: those in its record, and those that were put beside it. Raises `StorageError`."""
    return {**metrics_of(record.values), **_read(store, record.save_id, absent=logging.DEBUG)}


def _read(store: ObjectStore, save_id: str, absent: int) -> dict[str, float]:
    name = metrics_name(save_id)
    try:
        return metrics_of(read_complete(store, name, lambda data: wire.decode(data, name)))
    except NotFound as e:
        log.log(absent, "%s was not read: %s", name, e)
    except FormatError as e:
        log.warning("%s was not read: %s", name, e)
    return {}
