"""`everstep.Checkpointer`: what a training script sees of the engine.

Ties together the log, the writer's thread and the ranks; decides nothing that a pure module could decide. Invariants:
training is blocked only while the state is copied to host memory; a save that fails is reported and training goes on;
a process that was fenced never writes again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from everstep.checkpoint.errors import CheckpointError, Fenced, NewerCommit, SaveFailed, SettingUnusable
from everstep.checkpoint.format.layout import save_id
from everstep.checkpoint.format.manifest import CommitRecord
from everstep.checkpoint.format.steps import check_order, lost_keys, named_commit, unrestored_keys, whole_step
from everstep.checkpoint.handle import Committed, Events, Failed, SaveHandle
from everstep.checkpoint.keep import Keep, numbers
from everstep.checkpoint.load.loading import Loader
from everstep.checkpoint.load.selection import LoadReport, Selection
from everstep.checkpoint.log import opening
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.opening import Owner, Settings
from everstep.checkpoint.ranks import Alone, Ranks
from everstep.checkpoint.retention import pins
from everstep.checkpoint.retention.catalog import Catalog, Found
from everstep.checkpoint.retention.cleaner import Cleaner
from everstep.checkpoint.retention.late_metrics import LateMetrics, all_metrics
from everstep.checkpoint.retention.pins import saves_of
from everstep.checkpoint.save import at_exit
from everstep.checkpoint.save.policy import SavePolicy, Verdict
from everstep.checkpoint.save.snapshot import Snapshots, Versions
from everstep.checkpoint.save.writer import Writer
from everstep.checkpoint.state.capture import capture
from everstep.checkpoint.state.finite import Nonfinite
from everstep.contract.library_files import line_of_the_script
from everstep.reporting.stop_signal import Preempted, StopSignal
from everstep.storage import ObjectStore, RetryableError, StorageError, StoreUnusable

# --- lifetime
# How long a Checkpointer can be used: in the process that has its thread, until it is closed.


class Lifetime:
    """The lifetime of `checkpointer`, which saves to `url`."""

    def __init__(self, checkpointer: at_exit.Closable, url: str) -> None:
        self._checkpointer, self._url = checkpointer, url
        self._process = 0  # the process that has the thread; 0: there is no thread yet
        self.ends = False  # training is over, and its last save is not
        self.closed = False  # no further save is accepted
        self.over = False  # closed, and the last save has ended

    def starts(self) -> None:
        self._process = os.getpid()

    def then(self) -> str:
        """What follows a save that fails."""
        return "The commit before stays the newest" if self.closed or self.ends else "Training goes on"

    @property
    def is_here(self) -> bool:
        """Whether this process has the thread; a forked child does not have it."""
        return self._process == os.getpid()

    def check_process(self) -> None:
        if self._process and not self.is_here:
            raise SettingUnusable(
                f"{self._url}: this process was forked from the one that the Checkpointer belongs to, and has no "
                "thread that writes: make a Checkpointer in the child, with a URL of its own"
            )

    def check_open(self) -> None:
        self.check_process()
        if self.closed:
            raise SettingUnusable(f"the Checkpointer is closed{at_exit.late(self._checkpointer)}")

    def check_still_open(self, step: int) -> None:
        """Raises `SettingUnusable` if the Checkpointer was closed while a save of this step was made."""
        if self.closed:
            raise SettingUnusable(
                f"step {step} was not saved: meanwhile the Checkpointer was closed, by a handler of signals or by "
                "another thread"
            )


# --- checkpointer

logger = logging.getLogger("everstep.checkpoint")

IN_FLIGHT = "the save before is still in flight"

CLOSE_SECONDS = 600.0


class Checkpointer:
    """Saves training state so that it cannot tear, and finds the newest whole state again.

        checkpointer = everstep.Checkpointer("s3://bucket/run")
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        start = checkpointer.restore(state) or 0
        for step in range(start, steps):
            ...
            if checkpointer.should_save(step + 1):
                checkpointer.save(step + 1, state)
        checkpointer.close()

    Every rank makes one and calls `restore`, `should_save` and `save` at the same steps. State may hold modules (DDP
    and compiled ones are unwrapped), optimizers, schedulers, scalers, anything with `state_dict` and
    `load_state_dict`, tensors, and JSON values (tuples, non-string keys, NaN and bytes included). Sharded state (FSDP2,
    any DTensor) is saved and loaded at any world size. docs/reference/checkpoint.md has the whole.

    Arguments (defaults come from the `EVERSTEP_CHECKPOINT_*` variables that the operator sets):
    - `url`: a folder, `file://`, `s3://`, `gs://`, `az://`.
    - `keep`: how many of the newest commits to keep (3), or `everstep.checkpoint.Keep(last=3, every_steps=…,
      every_hours=…, best=…)`, which keeps others beyond them.
    - `every_seconds` or `every_steps`: what `should_save` answers by (60 seconds if neither is given; with both, as
      soon as one of them is due).
    - `rank`, `world_size`: only checked against the process group. `process_group`: one that moves CPU tensors.
    - `storage_options`: for the fsspec file system (keys, endpoint). `store`: an open store instead of a URL.
    - `single_committer`: accept a store without conditional create (EVERSTEP_SINGLE_COMMITTER=1); a zombie of an
      earlier round is then not kept out.
    - `on_event(kind, **fields)`: called for "opened", "restored", "stepped-over", "committed", "nonfinite",
      "save-failed", "save-skipped", "fenced" and "unusable", from the thread where it happened; its errors are logged.
      By default the events go to the operator as progress reports.
    - `peer_timeout`: seconds that rank 0 waits for the other ranks' parts before it abandons a save.
    - `max_loads`: a commit is stepped over if so many runs (3) have loaded it and then died before another commit, ten
      steps, or an orderly end; 0 for never.
    - `nonfinite`: what becomes of a save whose modules' parameters hold NaN or infinity. "refuse" (the default): it
      fails, and the commit before stays the latest. "mark": it is kept for those who look into it, and `restore` steps
      over it. "allow": nobody looks.

    - `on_preemption`: what SIGTERM does (EVERSTEP_CHECKPOINT_ON_PREEMPTION=1). With True `should_save` says yes on all
      ranks once any of them has got it, and the `save` that follows waits until its commit exists and ends the process
      (`everstep.Preempted`, exit code 86). `should_save` has to be called after every step, and is a collective in
      each. By default SIGTERM ends the process as if there were no Checkpointer. With a session it has no effect,
      because the session does that itself.

    Raises `StoreUnusable` (exit code 85) at once or from `restore` if the store can never work, `Fenced` (exit code
    84) from any later call once a newer writer owns the log, `Occupied` from `restore` while another run lives on the
    URL, `StateMismatch` for a state that cannot be saved or does not fit. A save that fails raises nothing: see
    `SaveHandle.wait` and "save-failed".
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        keep: int | Keep | None = None,
        every_seconds: float | None = None,
        every_steps: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        store: ObjectStore | None = None,
        single_committer: bool | None = None,
        on_event: Events | None = None,
        peer_timeout: float = 300.0,
        max_loads: int | None = None,
        nonfinite: Nonfinite | None = None,
        on_preemption: bool | None = None,
    ) -> None:
        settings = Settings.resolve(
            os.environ, url, keep, every_seconds, every_steps, single_committer, max_loads, nonfinite, on_preemption
        )
        self._settings = settings
        self._store = store if store is not None else opening.connect(settings, storage_options)
        self._catalog = Catalog(self._store)
        self._log = CommitLog(self._store)
        self._policy = SavePolicy(settings.every_seconds, settings.every_steps, time.monotonic())
        if not peer_timeout > 0:
            raise SettingUnusable(f"peer_timeout={peer_timeout}: seconds are expected, more than 0")
        self._peer_timeout = peer_timeout
        self._events = opening.quiet(on_event or opening.default_events())
        world_arguments = (process_group, rank, world_size)
        self._owner = Owner(self._store, self._log, settings, world_arguments, store is None, self._events)
        self._snapshots = Snapshots(settings.nonfinite)
        self._writer: Writer | None = None
        self._loader = Loader(self._store, self._log, settings, self._events)
        self._sequence = 0
        self._restored_id: str | None = None  # the id of the save that was restored last
        self._origin: list[str] = []  # the ids of the saves that have the shards of that commit
        self._keys: frozenset[str] = frozenset()  # the keys of the state that was restored or saved last
        self._left_out: frozenset[str] = frozenset()  # keys of the restored commit that no restore has asked for
        self._skip_logged = -1  # the save in flight for which a warning was logged that a due save is skipped
        self._late_metrics = LateMetrics(self._store, settings.keep)
        self._last = -1  # the step that this run has saved or restored last
        self._by_session = False
        self._stop = StopSignal()  # noted from the first `should_save` on, with `on_preemption`
        self._stopping: Ranks | None = None  # one of these was asked to stop: the next save is the last one
        self._saving = threading.RLock()  # a handler of signals may save within a save
        self._life = Lifetime(self, self._store.url)
        self._trainer: int | None = None  # the thread that restored, or saved first

    def restore(
        self, state: Mapping[str, Any], *, step: int | None = None, n: int | None = None, strict: bool = True,
        include: Iterable[str] | None = None, exclude: Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None, cast: bool = False,
    ) -> int | None:  # fmt: skip
        """Take the log, load the newest whole commit into `state` in place, and return its step; None if there is
        none. Collective. Commits with damaged shards are stepped over, each with an event that names the file.

        - `step`, `n`: the newest commit of this step, or log record `n`, and no other. Called later, it goes back.
        - `strict=False`: load what fits. `report` says what was left.
        - `include`, `exclude`: paths, as `"model/0.weight"`, or their beginnings, or globs. `rename`: from beginnings
          of paths in the commit to those in the state, which is what the other two see.
        - `cast`: convert tensors of another dtype.

        Raises `StateMismatch` if the commit does not fit (before anything is changed, unless only an object's own
        `load_state_dict` can tell), `NoCommit` and `Damaged` for what was asked for. If it raises after the first
        change, `save` refuses that state until a `restore` has succeeded.
        """
        started = time.monotonic()
        chosen = Selection.of(strict, include, exclude, rename, cast)
        step, n = named_commit(step, n)
        self._life.check_process()
        self._trainer = threading.get_ident()
        own, ranks = self._owner.take(restores=True)
        self._snapshots.holders.agree_on_unions(state, ranks)
        record = self._loader.load(
            state, own, ranks, chosen, holders=self._snapshots.holders, step=step, n=n, idle=self.wait, end=self._end,
        )  # fmt: skip
        self._origin[:] = [] if record is None else saves_of(record)
        self._last, self._owner.newest = -1 if record is None else record.step, -1
        self._start_writer()
        self._policy.saved(time.monotonic())
        self._late_metrics.restored(record, ranks.rank)
        self._keys = frozenset(state)
        left_out = frozenset(self.report.not_taken if chosen.whole else ()) - self._keys
        again = record is not None and record.save_id == self._restored_id  # as for a model, then for its optimizer
        self._left_out = left_out & self._left_out if again else left_out
        self._restored_id = None if record is None else record.save_id
        step, n = (None, None) if record is None else (record.step, record.n)
        self._events("restored", step=step, n=n, seconds=time.monotonic() - started)
        return step

    @property
    def report(self) -> LoadReport:
        """The report of the newest `restore`: what it left out."""
        return self._loader.report

    def should_save(self, step: int) -> bool:
        """Whether to save after `step`, the same on every rank. Collective at the steps where the answer may be yes.

        Not while a save is in flight: a slow store makes saves rarer, never training slower.
        """
        step, now = whole_step(step), time.monotonic()
        self._loader.mark.alive(step, None if self._writer is None else self._writer.later)
        candidate = self._policy.candidate(step)
        if not (candidate or self._settings.on_preemption):
            return False
        ready = self._ready_again(step)
        if isinstance(ready, SaveFailed):
            return False
        writer, ranks = ready
        if self._settings.on_preemption and not writer.fenced:
            self._stop.install()
            if ranks.maximum(int(self._stop.requested)):
                self._stopping = ranks
                return True
            if not candidate:
                return False
        verdict = Verdict.FENCED if writer.fenced else self._policy.decide(step, now, busy=writer.busy)
        verdict = Verdict(ranks.from_first(bytes([verdict]))[0])
        if verdict is Verdict.FENCED:
            raise writer.fenced or Fenced(f"{self._store.url}: rank 0 was fenced by a newer writer")
        if verdict is Verdict.BUSY and (self._policy.by_steps(step) or self._skip_logged != self._sequence):
            if self._skip_logged != self._sequence:  # once for each save in flight: a save may be due at every step
                logger.warning("should_save(%d) says no: %s. A slow store makes saves rarer", step, IN_FLIGHT)
            self._skip_logged = self._sequence
            self._events("save-skipped", step=step, error=IN_FLIGHT)
        return verdict is Verdict.SAVE

    def save(self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, Any] | None = None) -> SaveHandle:
        """Copy `state` to host memory and make it durable in the background as the state after `step`.

        Every rank calls it at the same step; the state may change as soon as it returns. While the save before is in
        flight it waits for that one; while another waits already, this call does too: no save is left out for that.
        `metrics`: numbers that belong to it, such as `{"loss": 2.1}`, for `Keep(best=…)` and `list`; those of rank 0
        count.

        The ranks' states are compared: in the 1st, 2nd, 4th, 8th, … save up to 64 MiB, in the others some elements of
        each tensor. If they differ nothing is committed, and the next `save` raises `StateMismatch` on rank 0, with
        the keys that do.
        """
        since = None
        if self._by_session or self._trainer in (None, threading.get_ident()):
            self._trainer = threading.get_ident()
        else:
            # Another save may have to end first, and training may go on meanwhile.
            since = Versions(capture(state, 0), beside=True)
        with self._saving:
            handle = self._save(whole_step(step), state, numbers(metrics), since)
        if self._stopping is not None:
            self._end_preempted(handle, self._stopping)
        return handle

    def _end_preempted(self, handle: SaveHandle, ranks: Ranks) -> NoReturn:
        """End this process when the last save is over, or the time for it is. Raises `Preempted`. Collective."""
        committed, self._life.ends = False, True
        with contextlib.suppress(CheckpointError, TimeoutError):
            committed = isinstance(handle.wait(self._stop.remaining()), Committed)
        try:
            committed = ranks.from_first(bytes([committed])) == b"\x01"  # rank 0 commits
        except RuntimeError:  # rank 0 is gone already: it may have left behind its commit
            with contextlib.suppress(CheckpointError, StorageError):
                newest = self.latest()
                committed = newest is not None and newest.save_id == handle.save_id
        error = Preempted(handle.step, committed)
        self._stop.leave(error)
        logger.warning("%s", error)
        raise error

    def _save(
        self, step: int, state: Mapping[str, Any], metrics: dict[str, float], since: Versions | None
    ) -> SaveHandle:
        check_order(step, self._last, self._store.url)
        ready = self._ready_again(step)
        if isinstance(ready, SaveFailed):
            return self._late_metrics.saved(SaveHandle(step, Failed(step, ready)), metrics)
        writer, ranks = ready
        self._late_metrics.check(ranks.rank, by_session=self._by_session)
        holders = self._snapshots.holders
        if holders.unions is None:
            # With a session the marks are the same on all ranks, so there is nothing to agree on.
            holders.agree_on_unions(state, Alone() if self._by_session else ranks)
        torn = self._loader.torn(step, state)
        keys = lost_keys(step, self._keys, state) or unrestored_keys(step, self._left_out, state)
        problem = writer.fenced or torn or writer.refused or keys
        if problem is not None and not holders.unions:
            raise problem
        if problem is None:
            self._keys = frozenset(state)
        assert self._owner.record is not None
        self._sequence, self._last = self._sequence + 1, step  # on every rank alike, whatever becomes of the save
        sequence = self._sequence
        identifier = save_id(self._owner.record.n, self._owner.record.writer, sequence)
        compares = ranks.world_size > 1 and not self._by_session
        taken = self._snapshots.take(state, ranks, problem, turn=sequence if compares else None, since=since)
        at_exit.saves()
        writer.wait_for_room()
        self._policy.saved(time.monotonic())
        handle = SaveHandle(
            step, save_id=identifier, called_at="" if self._by_session else line_of_the_script(sys._getframe(1))
        )
        try:
            staged = self._snapshots.copy(taken, ranks, handle, metrics)
            self._life.check_still_open(step)
            if self._sequence != sequence:
                raise SaveFailed(f"step {step} was not saved: meanwhile a handler of signals saved step {self._last}")
            writer.submit(staged, handle)
        except SaveFailed as e:  # no memory, or no whole copy: training goes on, and so do the other ranks
            writer.leave_out(handle, ranks.rank, e, newest=self._sequence == sequence)
        except BaseException as e:  # a signal too, whose handler may end the script
            if writer.newest is not handle:
                handle.finish(Failed(step, SaveFailed(f"step {step} was not saved: {e!r} while it was copied")))
            raise
        if self._life.closed:  # a signal handler has closed this during the save, and nobody else waits for the save
            writer.close(CLOSE_SECONDS)
        return self._late_metrics.saved(handle, metrics)

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Numbers that belong to the state after `step` and are known only after its `save`, as an evaluation's are.
        They count as if `save` had been given them, for `Keep(best=…)` from the next save on. Those of rank 0 count.

        Raises `CheckpointError` for what is no number, and for a step that is not among the newest saves of this run.
        """
        self._life.check_open()
        self._late_metrics.add(whole_step(step), numbers(metrics), None if self._writer is None else self._writer.later)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no save is in flight; False after `timeout` seconds. Raises nothing: see `SaveHandle.wait`."""
        return self._writer is None or not self._life.is_here or self._writer.idle(timeout)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Finish the save in flight and the one that waits for it, and stop the thread. A script that ends in order
        without it, by `sys.exit` too, does the same at its end, and has exit code 1 where this raises.

        Raises `SaveFailed` if the newest save failed, or is not over after `timeout` seconds, unless its handle's
        `wait` has raised that; `Fenced` if a newer writer owns the log.
        """
        try:
            self._close(timeout)
        except Exception:
            self._leave()
            raise
        self._leave()  # not if a signal handler ends the wait: then the script's end, or the next call, closes this

    def _close(self, timeout: float) -> None:
        if self._life.over or self._writer is None or not self._life.is_here:
            return  # in a forked child the saves are its parent's
        if not self._life.closed:
            self._loader.mark.close(self._writer.later)
        self._life.closed = True
        newest = self._writer.newest
        self._writer.close(timeout)
        self._life.over = True
        if self._writer.fenced:
            raise self._writer.fenced
        if newest is not None and (problem := newest.unraised_error()) is not None:
            raise problem

    def _leave(self) -> None:
        at_exit.forget(self)
        self._owner.end_sign(timeout=5.0)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()
        else:
            at_exit.forget(self)  # no wait for the save: other processes wait for this script to end

    # --- the commits below the URL. Nothing here takes the log, or changes what a commit holds: any process may call it

    def list(self) -> tuple[Found, ...]:
        """The commits that have their data, newest first. It does not take the log: any process may call it."""
        return self._catalog.list()

    def latest(self) -> Found | None:
        """The newest commit in the log, of any writer. Only the log is read."""
        record = self._catalog.latest()
        return Found.of(record) if record else None

    def verify(self, step: int | None = None, *, n: int | None = None) -> tuple[str, ...]:
        """The problems of the shards of the newest commit, that of `step`, or record `n`; each text names a file. Empty
        if the commit is whole, or if there is no commit at all. Reads every byte."""
        if step is None and n is None and self._catalog.latest() is None:
            return ()
        return self._catalog.verify(step, n)

    def pin(self, step: int | None = None, *, n: int | None = None) -> Found:
        """Keep the newest commit, that of `step`, or record `n`, until `unpin`: no clean-up deletes it, whoever cleans.
        Raises `CheckpointError` if there is none, or its deletion has begun."""
        return self._described(self._catalog.pin(step, n))

    def unpin(self, step: int | None = None, *, n: int | None = None) -> Found:
        """Take a pin back, and what `Keep` holds the commit by beyond the newest ones. A tag stays."""
        return self._described(self._catalog.unpin(step, n))

    def tag(self, tag: str, step: int | None = None, *, n: int | None = None) -> Found:
        """Call the newest commit, that of `step`, or record `n`, by a name, and keep it until `untag`. The commit that
        had the name before loses it. Raises `CheckpointError` as `pin` does, and for a tag that is no name."""
        return self._described(self._catalog.tag(tag, step, n))

    def untag(self, tag: str) -> None:
        """Take a tag away. Raises `NoCommit` if there is none."""
        self._catalog.untag(tag)

    def tagged(self, tag: str) -> Found:
        """The commit of a tag: `restore(state, n=checkpointer.tagged("best-eval").n)`. Raises `NoCommit`."""
        return self._described(self._catalog.tagged(tag))

    def _described(self, record: CommitRecord) -> Found:
        return Found.of(record, pins.holds(self._store), later=all_metrics(self._store, record))

    def gc(self) -> tuple[str, ...]:
        """Clean up now, as is done after each commit; the save ids of what was deleted."""
        return tuple(delete.save_id for delete in self._catalog.gc(self._settings.keep.last))

    def export(
        self, path: str | os.PathLike[str], step: int | None = None, *, format: str = "safetensors",
        keys: Iterable[str] | None = None,
    ) -> tuple[str, ...]:  # fmt: skip
        """Write a commit (the newest) as files that other tools open: "safetensors", "huggingface", "torch" or "dcp";
        the files' names. See `outgoing.export_as`, and docs/reference/checkpoint.md."""
        from everstep.checkpoint.convert.outgoing import export_as  # noqa: PLC0415  few runs export

        return export_as(self._store, self._catalog.find(step), path, format, keys)

    # --- before a save

    def _ready(self, step: int) -> tuple[Writer, Ranks]:
        """The writer and the ranks for a save of the state after `step`. A script may skip `restore` only while there
        is nothing to restore: a commit that does not descend from the newest one would fork the training state, and
        retention would then delete the good one."""
        self._life.check_open()
        if self._writer is None:
            own, _ = self._owner.take()
            if own.commit >= 0 and self._owner.round is None:
                raise SettingUnusable(
                    f"{self._store.url}: log record {own.commit} is a commit that was not restored; call restore() "
                    "before the first save, or save to an empty URL"
                )
            self._start_writer()
        if self._owner.round is not None and step < self._owner.newest:
            # Under this world's own open, so that no older world can commit any more.
            raise NewerCommit(
                f"{self._store.url}: step {self._owner.newest} is committed, and the state is that of {step}"
            )
        assert self._writer is not None
        assert self._owner.ranks is not None
        return self._writer, self._owner.ranks

    def _ready_again(self, step: int) -> tuple[Writer, Ranks] | SaveFailed:
        """`_ready`, or the error of a save that failed: the same on every rank. After a change of the world the log
        still has to be taken. If the store does not answer then, or cannot be used, this save fails and training goes
        on: the state is in the ranks' memory alone, and its end would lose it."""
        try:
            return self._ready(step)
        except (RetryableError, StoreUnusable) as e:
            if self._owner.round is None:
                raise
            self._policy.saved(time.monotonic())  # the next one is not due at once
            logger.warning("step %d was not saved: %s. %s", step, e, self._life.then())
            self._events("save-failed", step=step, error=str(e))
            return SaveFailed(f"step {step} was not saved: {e}")

    def _end(self) -> int:
        """The record below which a commit may be restored. The commits that this run has made are below it."""
        assert self._owner.record is not None
        if self._writer is None:
            return self._owner.record.n
        if self._writer.fenced is not None:
            raise self._writer.fenced
        return self._log.head().last + 1

    def _start_writer(self) -> None:
        if self._writer is None:
            assert self._owner.record is not None
            cleaner = Cleaner(
                self._store, self._owner.record, self._settings.keep, self._loader.damaged, self._loader.mark,
                suspected=self._loader.suspected, restored=self._origin,
            )  # fmt: skip
            self._writer = Writer(
                self._store, self._owner.record, self._peer_timeout, cleaner, self._events,
                self._life.then,
            )  # fmt: skip
            self._life.starts()
            self._late_metrics.taken(self._writer.later)
            if not self._by_session:
                at_exit.close(self, self._store.url)
