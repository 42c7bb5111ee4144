"""Coordinates the ranks between two steps of a training loop: reports, agrees, saves and stops.

It knows neither the loop nor a framework: the session and the adapters give it the state, and say when a step is
complete. Invariants: every rank saves and stops after the same step; a process that was asked to stop leaves at a
boundary, and runs no code behind the training loop unless training was complete by then; after `leave`, SIGTERM has its
former handler.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from everstep.checkpoint import Checkpointer, Fenced, SaveFailed, StateMismatch
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.state.divided import by_parts
from everstep.contract import env, error_file, termination
from everstep.instruments import listener
from everstep.instruments.live_profile import LiveProfile
from everstep.recovery.announcements import AnnouncedRound, Announcements
from everstep.recovery.errors import LoopError
from everstep.recovery.group.collectives import gather_over, reduce_into
from everstep.recovery.group.members import Members
from everstep.recovery.state import model_parts
from everstep.reporting.report import Reporter, default_reporter
from everstep.reporting.stop_signal import Left, Preempted, StopSignal
from everstep.storage.errors import StoreUnusable
from everstep.train.coordination.group_shutdown import part
from everstep.train.coordination.metrics import Metrics
from everstep.train.coordination.save_schedule import SaveSchedule
from everstep.train.coordination.step_agreement import StepAgreement, StepRequest, group_of_its_own
from everstep.train.coordination.structure import StructureCheck

log = logging.getLogger("everstep.train")

HANDLER_STEPS = 16  # steps between two checks of the handler of SIGTERM, which take 10 µs
ONE_MORE_SECONDS, ONE_MORE_STEPS = 5.0, 3.0  # the time, or steps' times, that must be left to begin one more step
PEER_SECONDS = 600.0  # after which an agreement of the ranks fails


class StepCoordinator:
    """Call `join` and `restore` once, `completed` after each step, `finish` after the last, and `leave` in any case."""

    def __init__(self, schedule: SaveSchedule | None, reporter: Reporter) -> None:
        self._schedule = schedule
        self._reporter = reporter
        self._metrics = Metrics()
        self._evaluates = False
        self._stop = StopSignal()
        self._state: Mapping[str, Any] = {}
        self._structure: StructureCheck | None = None  # where something is kept for other processes
        self._group: Any = None
        self._agreement = StepAgreement(None)
        self._rank = 0
        self._check: Callable[[], None] = _nothing
        self._compare: Callable[[], None] = _nothing
        # The state as a commit names it.
        self.named: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda state: state
        self.model_size = 1  # places in a replica, each with its own optimizers
        self._counted, self._step_seconds = time.monotonic(), 0.0  # when the newest step was counted, and its duration
        self.live_profile = LiveProfile(schedule.in_session.put if schedule is not None else None)
        self.has_time = False  # when the run was asked to stop: for one more step, on all ranks
        self.step = 0

    @classmethod
    def find(
        cls,
        checkpoint: str | os.PathLike[str] | Checkpointer | None,
        every_steps: int | None,
        every_seconds: float | None,
        options: Mapping[str, Any],
    ) -> StepCoordinator:
        """With the store and policy that were passed, else those of the environment; see `everstep.start`."""
        with _exit_codes():
            schedule = SaveSchedule.find(checkpoint, every_steps, every_seconds, options)
        return cls(schedule, default_reporter())

    def join(self) -> None:
        """Meet the other ranks. Collective; the process group must exist if there is to be one."""
        if dist.is_available() and dist.is_initialized():
            self._rank = dist.get_rank()
        self._group = group_of_its_own(PEER_SECONDS)
        self._agreement = StepAgreement(self._group)
        self._reporter.started()
        if torch.accelerator.is_available():
            # The device of this thread: in the reporter's thread another one is the current one.
            device = torch.accelerator.current_device_index()
            self._reporter.memory.device = lambda: torch.accelerator.max_memory_allocated(device)

    def track(self, state: Mapping[str, Any]) -> None:
        """Set the state to save, in a process that restores nothing because a peer gives it the state."""
        self._state = state
        self._structure = self._structure or StructureCheck(state)

    def check_by(self, check: Callable[[], None]) -> None:
        """Call this function while waiting for a save. It raises if a rank of the save is gone."""
        self._check = check

    def compare_by(self, compare: Callable[[], None]) -> None:
        """Call this function before each save. It raises if the ranks' states differ. Collective."""
        self._compare = compare

    def move(self, ranks: Ranks, round_: int, rendezvous: str) -> None:
        """The world has changed. Agreements of the old world, and a save in flight, are given up."""
        self._rank = ranks.rank
        self._reporter.moved(ranks.rank, ranks.world_size, round_)
        self._group = ranks.group if ranks.world_size > 1 else None
        self._agreement = self._intent_over(self._group)
        if self._schedule is not None:
            self._schedule.move(ranks, round_, rendezvous)

    def divide(self, model_size: int, named: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """The script divides its model over the `model_size` ranks of a replica; names in commits contain the place."""
        self.model_size, self.named = model_size, named
        self._agreement = self._intent_over(self._group)

    def _intent_over(self, group: Any) -> StepAgreement:
        return StepAgreement(group, model_rank=self._rank % self.model_size, model_size=self.model_size)

    def restore(self, state: Mapping[str, Any]) -> int:
        """Restore `state`, which is also what is saved from now on; completed steps. Collective."""
        self._state = state
        if self._schedule is not None:
            self._structure = self._structure or StructureCheck(state)
            with _exit_codes():
                named = self._as_saved(state)
                try:
                    self.step = self._schedule.restore(named)
                except StateMismatch as e:
                    if not (
                        more := model_parts.advice(
                            str(e), named.model_size if isinstance(named, model_parts.Placed) else 1
                        )
                    ):
                        raise
                    raise StateMismatch(f"{e}{more}") from e
        return self.step

    @property
    def saves(self) -> bool:
        """Whether there is a store to save to."""
        return self._schedule is not None

    @property
    def restored(self) -> bool:
        """Whether `restore` found a commit."""
        return self._schedule is not None and self._schedule.restored

    @property
    def schedule(self) -> SaveSchedule | None:
        """The checkpointer; None without a store."""
        return self._schedule

    def newest_commit(self) -> int:
        """The step of the newest commit; -1 if there is none, or none is known. Not collective."""
        newest = self._schedule.newest() if self._schedule is not None else None
        return -1 if newest is None else newest

    def newest_of_others(self, members: Members, last: AnnouncedRound | None, round_: AnnouncedRound) -> int:
        """The step of the newest commit, if there was a round without any of these members after `last`, this one's;
        otherwise -1. Such members come back after others have trained without them, and are gone. Collective. An older
        world may still commit after this; the first save of this world then finds that (`NewerCommit`)."""
        known = -1 if last is None else last.number if last.rendezvous == round_.rendezvous else 0
        newest = members.maximum(known)  # 0: the rounds of another document, which are not comparable with these
        if newest < 0 or 0 < round_.number - 1 <= newest:
            return -1
        return members.maximum(self.newest_commit() if members.rank == 0 else -1)

    def begin(self, state: Mapping[str, Any]) -> int:
        """`join` and `restore`, in a world that does not change."""
        self.join()
        self.listen()
        return self.restore(state)

    def listen(self) -> None:
        """Let a person ask for a profile, in a world that does not change."""
        listen(self.live_profile, lambda: self.step)

    def watch(self) -> None:
        """Note SIGTERM from here on. Called after the framework has set its own handler, which this one replaces, and
        when this process knows its rank."""
        self._stop.__enter__()
        if self._schedule is None and self._rank == 0:
            log.warning("no checkpoint URL: nothing is saved. Pass one, or set EVERSTEP_CHECKPOINT_URL")

    def check_handler(self, step: int) -> None:
        """Raises `LoopError` if the script has set its own handler of SIGTERM in its loop. Checked at some steps."""
        if step % HANDLER_STEPS == 0 and self._stop.replaced:
            raise LoopError(
                "signal.signal(SIGTERM, …) in the loop: the run would not hear that it is to stop, and would not save. "
                "Leave that handler out: at SIGTERM all ranks finish the step, save and end with exit code 86"
            )

    def log(self, metrics: Mapping[str, Any], *, of_state: bool = False) -> None:
        """Log numbers or 0-d tensors of the step that `agree` ends, for the progress report and the step's commit.
        Never waits for a device. `of_state`: they are of the state between two steps, whose save may have begun."""
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float | torch.Tensor)}
        of_state = of_state or self._evaluates
        self._metrics.log(numbers, of_state=of_state)
        if (
            of_state
            and self._rank == 0
            and self._schedule is not None
            and self._schedule.measures(self.step, again=self._evaluates)
        ):
            self._schedule.checkpointer.add_metrics(self.step, self._metrics.of_state())

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in which logged values belong to the present state, and not to the next step."""
        self._evaluates = True
        try:
            yield
        finally:
            self._evaluates = False

    def completed(self, step: int, *, total: int | None = None, epoch: int | None = None) -> None:
        """`step` steps are complete, and the state is what it was after them: `count` and `agree`. The next begins."""
        self.count(step, total=total, epoch=epoch)
        self.agree()
        if self.live_profile.request_id is not None:
            self.live_profile.step_begins(step, self._rank)

    def count(self, step: int, *, total: int | None = None, epoch: int | None = None) -> None:
        """`step` steps are complete: report it."""
        self.step = step
        self._metrics.counted()
        if self._schedule is not None:
            self._schedule.counted(step)
        now = time.monotonic()
        self._counted, self._step_seconds = now, now - self._counted
        self._reporter.step(step, total_steps=total, epoch=epoch, metrics=self._metrics.ready())

    def rehearsed(self, what: str) -> None:
        """The rehearsal of this program to report."""
        self._reporter.rehearsed(what)

    def slow(self, what: str | None, rank: int | None = None) -> None:
        """The straggler to report, in words, and its rank; None if there is none any more."""
        self._reporter.slow(what, rank)

    def agree(self, *, move: bool = False, updates: int = 0, calls: int = 0) -> bool:
        """Save if a save is due. Returns whether all ranks leave this round now, because one of them wished to `move`.
        Raises `Preempted` (exit code 86) on every rank, after a commit, once any rank was asked to stop; `SystemExit`
        if this process was fenced; `LoopError` on every rank if their numbers of `updates` (optimizer steps) or `calls`
        (the program's collectives) differ. Collective."""
        try:
            return self._agree(move, updates, calls)
        finally:
            self._metrics.over()

    def _agree(self, move: bool, updates: int, calls: int) -> bool:
        with _exit_codes():
            schedule = self._schedule
            if self._structure is not None:
                self._structure.step_over(self.step)
            wanted, committed = False, -1
            if schedule is not None:
                wanted = schedule.missed or (self._rank == 0 and schedule.due())
                committed = schedule.committed
            wish = StepRequest(self._stop.requested, wanted, move, updates, calls, committed)
            agreed = self._agreement.at_boundary(wish)
            if schedule is not None:
                schedule.committed = agreed.committed
            if agreed.stop:
                self._preempt()
            if schedule is not None and (schedule.due_at(self.step) or agreed.save):
                self._begin_save(schedule)
        if agreed.move:
            self._agreement.finish()  # otherwise the ranks that leave first would break it for the others
        return agreed.move

    def save(self, step: int) -> None:
        """Begin to save the state after the last step now, before it changes. Collective."""
        self.step = step
        if self._schedule is not None and not self._all(self._schedule.durable(step, None, self._check)):
            with _exit_codes():
                self._begin_save(self._schedule)

    def commit(self) -> None:
        """Commit the present state, unless it is committed, and wait for it. Collective."""
        with _exit_codes():
            if self._schedule is not None and not self._save_now(lambda: None):
                log.warning("step %d could not be committed: an older commit is restored", self.step)

    def _begin_save(self, schedule: SaveSchedule) -> None:
        if self._structure is not None:
            self._structure.check(self.step)
        self._compare()
        schedule.save(self.step, self._as_saved(self._state), self._metrics.of_step() if self._rank == 0 else None)

    def _as_saved(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.named(by_parts(state, self.model_size))

    def same(self, number: int) -> bool:
        """Whether all ranks give the same number, of at most 63 bits. Collective."""
        if self._group is None:
            return True
        ends = torch.tensor([number, -number], dtype=torch.int64)
        reduce_into(ends, dist.ReduceOp.MAX, self._group).wait()
        most, least = ends.tolist()
        return bool(most == -least)

    def gather(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's values, by rank. Each rank gives the same number of values, of at most 63 bits. Collective."""
        return [tuple(values)] if self._group is None else gather_over(values, self._group)

    def first(self, number: int) -> int:
        """Rank 0's number, of at most 64 bits. Collective."""
        high, low = self.gather(divmod(number, 2**32))[0]
        return high << 32 | low

    def finish(self, step: int, *, save: bool = True) -> None:
        """Training is complete after `step` steps: commit them, and report it. Collective."""
        if step != self.step:
            self.count(step)
        self._agreement.finish()
        self._training_ends()
        with _exit_codes():
            if self._schedule is not None and save and not self._save_now(lambda: None):
                failure = self._schedule.failure
                raise SaveFailed(
                    f"the last step, {step}, could not be committed: {failure or 'another rank names the cause'}. "
                    "Started again, the run goes on from its newest commit"
                ) from failure
        self.close()
        self.live_profile.close()
        self._reporter.done()

    def _training_ends(self) -> None:
        if self._schedule is not None:
            self._schedule.in_session.ends()

    def close(self) -> None:
        """Let the save in flight end. May be called again."""
        if self._schedule is not None:
            with _exit_codes():
                self._schedule.checkpointer.close()

    def leave(self) -> None:
        """Restore the former handler of SIGTERM."""
        self._stop.__exit__(None, None, None)

    def part(self) -> NoReturn:
        """Leave, while the others go on from the same state. Raises `Left` (exit code 86)."""
        self._end(Left(self.step))

    def _preempt(self) -> NoReturn:
        try:
            self._agreement.finish()
            self._training_ends()
            committed = self._save_now(self._stop.remaining)
            enough = self._stop.remaining() > ONE_MORE_SECONDS + ONE_MORE_STEPS * self._step_seconds
            self.has_time = self._all(committed and enough)
        except RuntimeError:
            # The others leave as soon as the commit exists, maybe before this rank knows that it does.
            if self.newest_commit() != self.step:
                raise
            committed = True
        self._end(Preempted(self.step, committed))

    def _end(self, error: Preempted) -> NoReturn:
        self._stop.leave(error)
        if self._rank == 0 or isinstance(error, Left):
            log.warning("%s", error)
        self._reporter.flush()
        self._group, self._agreement = (
            None,
            StepAgreement(None),
        )  # the frames of `error` would keep them till Python is half gone
        atexit.register(part)
        raise error

    def _save_now(self, remaining: Callable[[], float | None]) -> bool:
        """Commit the present state, unless it is committed. Returns whether it is durable; all ranks get the same
        answer."""
        if self._schedule is None:
            return False
        if self._all(self._schedule.durable(self.step, remaining(), self._check)):
            return True
        self._begin_save(self._schedule)
        return self._all(self._schedule.durable(self.step, remaining(), self._check))

    def _all(self, done: bool) -> bool:
        """Whether every rank says yes. Rank 0 does so only when the commit exists, so no rank leaves before."""
        if self._group is None:
            return done
        answer = torch.tensor([int(done)], dtype=torch.int32)
        reduce_into(answer, dist.ReduceOp.MIN, self._group).wait()
        return bool(answer.item())


def listen(live: LiveProfile, step: Callable[[], int | None], environ: Mapping[str, str] = os.environ) -> None:
    """Let a person ask for a profile of a process whose world does not change: nobody announces rounds to it. Under an
    agent the agent is asked, as for a process that recovers; under another launcher the process itself is. `step`: the
    present one."""
    if path := environ.get(env.AGENT_SOCKET):
        Announcements(path, recovers=False).on_profile(live.ask)
    else:
        listener.listen(live, step)


def _nothing() -> None:
    """For a world whose launcher ends all processes when a peer is gone."""


@contextmanager
def _exit_codes() -> Iterator[None]:
    """End the process with the error's own exit code, which the operator reads, if it has one."""
    try:
        yield
    except (Fenced, StoreUnusable) as error:
        error_file.write(error)
        termination.write_error(error)
        print(f"everstep: {error}", file=sys.stderr)  # noqa: T201  its last line
        raise SystemExit(error.exit_code) from error
