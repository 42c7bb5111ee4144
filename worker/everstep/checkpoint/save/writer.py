"""The thread that makes saves durable, one at a time, while training goes on.

It gets staged bytes and never touches live tensors or the process group. Invariants: saves are written one at a time,
in the order in which they were submitted, and on each rank the same ones; at most `MOST` exist at once; whatever error
there is, each save ends, and training goes on, unless another writer owns the log (`fenced`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from everstep.checkpoint.errors import CheckpointError, Fenced, SaveFailed, StateMismatch
from everstep.checkpoint.flag import Flag
from everstep.checkpoint.format.manifest import NONE, CommitRecord, OpenRecord, Part, merge_parts, stamp
from everstep.checkpoint.format.wire import Json
from everstep.checkpoint.handle import Committed, Events, Failed, Outcome, SaveHandle, Written
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.decisions import Head
from everstep.checkpoint.retention.cleaner import Cleaner, is_absent
from everstep.checkpoint.save.parts import Staged, Wait, gather_parts, give_up_part, write_part
from everstep.checkpoint.state.alike import differing, unlike
from everstep.checkpoint.state.union import merged
from everstep.contract import unsaved
from everstep.storage import ObjectStore, RetryableError, StorageError

logger = logging.getLogger("everstep.checkpoint")

MOST: Final = 2  # saves: one that is in flight, and one that waits for it
_NOTES: Final = 4
_VOID: Final = 64  # failed saves that are remembered; the next commit's clean-up knows all


def _ignored(kind: str, **fields: Any) -> None:
    """The hook of an abandoned writer: nobody gets its events."""


class Writer:
    """Writes the saves of one rank, under the open record `own`. `peer_timeout`: seconds. `then`: what follows
    a save that fails, in words."""

    def __init__(
        self, store: ObjectStore, own: OpenRecord, peer_timeout: float, cleaner: Cleaner, events: Events,
        then: Callable[[], str],
    ) -> None:  # fmt: skip
        self._store = store
        self._log = CommitLog(store)
        self._own, self._peer_timeout = own, peer_timeout
        self._cleaner = cleaner
        self._events, self._then = events, then
        self._head = Head(own.n, own, own.commit)
        self._stop = Flag()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._notes = 0  # how many of them are in the queue
        self._saves: list[SaveHandle] = []  # saves that may still be running
        self.newest: SaveHandle | None = None
        self._alike: int | None = None  # the step of the newest save in which the ranks' states were the same
        self._thread: threading.Thread | None = None
        self._threads = weakref.WeakSet[threading.Thread]()  # the thread, and earlier ones that may still run
        self._makes_room, self._has_failed = True, False  # whether the next save makes room first, and for a failure
        self._void: deque[str] = deque(maxlen=_VOID)  # saves that failed before a commit was tried
        self._appended = ""  # the save whose commit was tried last
        self._unsure = ""  # the same, if a full disk refused it
        self.fenced: Fenced | None = None
        self.refused: StateMismatch | None = None  # why the last save was refused: the ranks' parts are not one state

    def _unfinished(self) -> list[SaveHandle]:
        # One by one: a handler of signals may save in between.
        for handle in [handle for handle in list(self._saves) if handle.done()]:
            with contextlib.suppress(ValueError):
                self._saves.remove(handle)
        return self._saves

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return bool(self._unfinished())

    def idle(self, timeout: float | None = None) -> bool:
        """Wait until no save is in flight, and none waits; False after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        for handle in list(self._unfinished()):
            handle._refuse_itself()
            if not handle._done.wait(None if until is None else max(0.0, until - time.monotonic())):
                return False
        return True

    def wait_for_room(self) -> None:
        """Until one more save may be submitted. Each save ends, so this does."""
        while len(unfinished := list(self._unfinished())) >= MOST:
            unfinished[0]._refuse_itself()
            unfinished[0]._done.wait()

    def submit(self, staged: Staged, handle: SaveHandle) -> None:
        """Write it, after the save in flight. The caller has waited for room."""
        # The order matters: a signal may interrupt the training thread for ever between any two of these lines. Then
        # nobody may wait for a save that is not in the queue, nor reuse the memory of one that is.
        self._take_newest(handle, "was in flight")
        handle._by = self._threads
        self._put(lambda: self._save(staged, handle))
        self._saves.append(handle)

    def give_up(self, save_id: str, rank: int, reason: str) -> None:
        """Tell the coordinator that this rank takes no part in a save, after the saves in flight."""

        def note() -> None:
            try:
                give_up_part(self._store, save_id, rank, reason)
            except StorageError as e:
                logger.warning("cannot tell the coordinator that rank %d gave up %s: %s", rank, save_id, e)

        self._note(note)

    def leave_out(self, handle: SaveHandle, rank: int, error: SaveFailed, *, newest: bool = True) -> None:
        """End a save as failed before this rank has written it, and tell the others. `newest`: no later save exists."""
        self._warn(handle.step, error)
        self._events("save-failed", step=handle.step, error=str(error))
        if newest:
            self._take_newest(handle, "had failed")
        handle.finish(Failed(handle.step, error))
        self._fails(handle.save_id, error)
        if rank != 0:
            self.give_up(handle.save_id, rank, str(error))

    def _take_newest(self, handle: SaveHandle, what: str) -> None:
        """This is the newest save. Whatever became of the one before, a process that ends loses no more than this."""
        before, self.newest = self.newest, handle
        self._note_unsaved(handle, what)
        if before is not None and before is not handle:
            unsaved.forget(before)

    def _note_unsaved(self, handle: SaveHandle, what: str) -> None:
        unsaved.note(handle, f"its save of step {handle.step} to {self._store.url} {what}")

    def _warn(self, step: int, error: CheckpointError) -> None:
        """Log a save that failed."""
        logger.warning("%s. %s", _not_saved(step, error), self._then())

    def later(self, task: Callable[[], object]) -> None:
        """Do a small task on the writer's thread, after the saves in flight. Its errors are logged. It is never
        dropped."""

        def run() -> None:
            try:
                task()
            except (StorageError, CheckpointError) as e:
                logger.warning("the store did not take a note: %s", e)

        self._put(run)

    def close(self, timeout: float) -> None:
        """Finish what is in flight, for at most `timeout` seconds, then stop."""
        self.idle(timeout)
        self._stop.set()
        if self._thread is not None:
            self._put(None)
            self._thread.join(1.0 if self.busy else timeout)
            self._thread = None

    def abandon(self) -> None:
        """Stop without waiting. A save in flight may still be committed or fail; no event reports which."""
        self._events = _ignored
        if self.newest is not None:
            unsaved.forget(self.newest)
        self._stop.set()
        if self._thread is not None:
            self._put(None)
            self._thread = None

    def _put(self, task: Callable[[], None] | None) -> None:
        self._queue.put(task)
        # The thread is started last, because a signal handler may close this writer in between, and end the thread.
        if self._thread is None and task is not None:
            self._thread = threading.Thread(target=self._run, name="everstep-save", daemon=True)
            self._threads.add(self._thread)
            self._thread.start()

    def _note(self, task: Callable[[], None]) -> None:
        """Queue a task that may be dropped. A save and the end of the thread may not."""

        def run() -> None:
            self._notes -= 1
            task()

        if self._notes < _NOTES:
            self._notes += 1
            self._put(run)
        else:
            logger.warning("the store is too slow even for notes to the coordinator; one is dropped")

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except BaseException:  # of a hook or a store: this thread still has to write the other saves
                logger.exception("an error in the thread that writes checkpoints; it goes on with the next task")
            del task  # it keeps the staged bytes, and the next save may need their memory

    def _save(self, staged: Staged, handle: SaveHandle) -> None:
        started = time.monotonic()
        try:
            outcome = self._write(staged, handle.called_at, started)
        except BaseException as e:  # training goes on after any error, and the caller gets it
            error = self._overtaken(e) or (
                e if isinstance(e, CheckpointError) else SaveFailed(f"step {staged.step}: {e}")
            )
            outcome = Failed(staged.step, error)
            if isinstance(e, StateMismatch):
                self.refused = e
            self._fails(staged.save_id, e)
            if error is not e:
                error.__cause__ = e
            try:
                self._failed(staged, error)
            except BaseException:
                logger.exception("a save failed, and so did the report of its failure")
        if not isinstance(outcome, Failed):  # before the script can know of the outcome, and end the process
            unsaved.forget(handle)
        elif handle is self.newest and self._events is not _ignored:
            self._note_unsaved(handle, "had failed")
        handle.finish(outcome)
        if isinstance(outcome, Committed):
            self._cleaner.clean()

    def _overtaken(self, error: BaseException) -> Fenced | None:
        """The cause of a failed save if a newer writer has opened the log: it removes what this one was writing."""
        if isinstance(error, Fenced | StateMismatch) or _is_outage(error):
            return None
        try:
            return self._log.overtaken(self._own)
        except BaseException:  # a store of the script's own may raise anything, and this save still has to end
            logger.exception("the log was not read after a save that failed")
            return None

    def _fails(self, save_id: str, error: BaseException) -> None:
        """Remember a failed save: shards of it, from this rank or others, may be left in the store."""
        if save_id != self._appended:
            self._void.append(save_id)
        elif _is_full(error):  # after any other error the record may still be created
            self._unsure = save_id
        # In an outage a clean-up would wait as long as the save did, and the next save twice as long.
        if _is_full(error) or not _is_outage(error):
            self._makes_room = self._has_failed = True

    def _make_room(self) -> None:
        """Clean up before the first save, and before a save after one that failed by more than an outage."""
        if not self._makes_room:
            return
        self._makes_room = False
        try:
            if self._unsure and is_absent(self._log, self._unsure):
                self._void.append(self._unsure)
                self._unsure = ""
            self._cleaner.make_room(frozenset(self._void.copy()), failed=self._has_failed)
        except Exception:
            logger.exception("the clean-up before a save failed; the save goes on")

    def _write(self, staged: Staged, called_at: str, started: float) -> Outcome:
        if self._store.capabilities.local:  # another folder may be at this path now: write nothing into it
            self._log.check_own(self._own)
        if staged.rank == 0:
            self._make_room()
        part = write_part(self._store, staged)
        if staged.rank != 0:
            return Written(staged.step)
        wait = Wait(self._peer_timeout, time.monotonic() - started, called_at)
        parts = gather_parts(self._store, staged, part, wait, self._stop)
        if any(p.digests for p in parts) and (keys := differing([p.digests for p in parts])):
            equal = f" (in the save of step {self._alike} they still were)" if self._alike is not None else ""
            raise StateMismatch(
                f"{', '.join(keys)}: not the same on all {len(parts)} ranks{equal}, and a commit has one value for "
                f"all: step {staged.step} was not saved. If the values should be equal, broadcast them. If each rank "
                "has its own, give an object whose class sets everstep_per_rank = True (everstep.RngState for random "
                "generators). If each rank holds other names (experts, pipeline stages), mark the object with "
                "everstep.Union"
            )
        united = self._united(parts)
        self._alike = staged.step
        shards, entries = merge_parts(parts)
        own, now = self._own, time.time()
        values: dict[str, Json] = {"state": {**staged.values, **united}}
        if any(p.values for p in parts):
            values["ranks"] = [p.values for p in parts]
        if bad := sorted({name for p in parts for name in p.nonfinite}):
            values["nonfinite"] = list(bad)
        if staged.metrics:
            values["metrics"] = dict(staged.metrics)
        draft = CommitRecord(
            NONE, own.writer, own.round, own.job_uid, staged.step, staged.save_id, staged.world_size,
            stamp(now), own.n, NONE, shards, entries, values,
        )  # fmt: skip
        self._appended = staged.save_id
        self._head, record = self._log.commit(self._head, own, draft)
        self._cleaner.committed(record)
        size, seconds = sum(s.bytes for s in shards), time.monotonic() - started
        try:
            if bad:
                self._events("nonfinite", step=record.step, n=record.n, names=bad)
            self._events("committed", step=record.step, n=record.n, at=now, bytes=size, seconds=seconds)
        except BaseException:  # SystemExit of a hook, which does not end a process from here: the commit exists
            logger.exception("on_event failed")
        return Committed(record.step, record.n, now, size, seconds)

    def _united(self, parts: Sequence[Part]) -> dict[str, Json]:
        """The commit's content from the ranks' unions, by key. Raises `StateMismatch`."""
        by_key: dict[str, list[tuple[int, Any]]] = {}
        for part in parts:
            for key, body in part.union.items():
                by_key.setdefault(key, []).append((part.rank, body))
        if (problem := unlike([p.union_digests for p in parts])) is not None:
            raise StateMismatch(problem)
        return {key: merged(by_key[key], key) for key in sorted(by_key)}

    def _failed(self, staged: Staged, error: CheckpointError) -> None:
        if isinstance(error, Fenced):
            self.fenced = error
            self._events("fenced", step=staged.step, error=error)
            return
        self._warn(staged.step, error)
        self._events("save-failed", step=staged.step, error=str(error))
        if staged.rank != 0:
            self.give_up(staged.save_id, staged.rank, str(error))


def _not_saved(step: int, error: CheckpointError) -> str:
    """What a log says of a save that failed. Most errors of saves name the step themselves."""
    text = str(error).removeprefix(f"step {step}: ").rstrip(".")
    return text if f"step {step} was not saved" in text else f"step {step} was not saved: {text}"


def _is_full(error: BaseException) -> bool:
    """Whether a disk or a quota was full."""
    return any(isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT) for e in _causes(error))


def _is_outage(error: BaseException) -> bool:
    """Whether the store could not be reached: another request would wait as long as the save did."""
    return any(isinstance(e, RetryableError) for e in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
