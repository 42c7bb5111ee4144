"""The kind of world whose members may change: a failed step is repeated, with the members of the next round."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from everstep.checkpoint.errors import NewerCommit
from everstep.contract import exit_codes
from everstep.recovery.announcements import AnnouncedRound, Drained
from everstep.recovery.ddp import uneven_inputs
from everstep.recovery.ddp.reducers import Reducers
from everstep.recovery.engine import Recovery
from everstep.recovery.errors import LoopError
from everstep.recovery.forming.forming import FormingFailed
from everstep.recovery.group.in_flight import is_of_lost_peer
from everstep.recovery.group.members import Members
from everstep.recovery.state.gradients import Gradients
from everstep.recovery.state.randomness import agree_on_seeds
from everstep.recovery.state.scalers import Scales
from everstep.recovery.transfer.agreement import NoState
from everstep.recovery.transfer.broadcast import TransferFailed
from everstep.recovery.validity import Validity
from everstep.train.between_steps import BetweenSteps
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.train.coordination.straggler import Straggler, StragglerDetector
from everstep.train.feeding.feed import Feed
from everstep.train.feeding.resharding import Resharding
from everstep.train.guards.common_samples import SAMPLES
from everstep.train.guards.comparison.restart_check import RestartCheck
from everstep.train.guards.comparison.shadow_step import ShadowStep
from everstep.train.guards.gradient_reduction import GradientReduction
from everstep.train.guards.replicas import Replicas
from everstep.train.guards.untracked.hooks import Hooks
from everstep.train.guards.untracked.untracked_state import UntrackedStateCheck
from everstep.train.step import Phase
from everstep.train.worlds import Checked, take_from

log = logging.getLogger("everstep.train")


class RecoveringWorld(Checked):
    """The world of the newest round."""

    def __init__(
        self, recovery: Recovery, coordinator: StepCoordinator, state: Mapping[str, Any], reducers: Reducers,
        feed: Feed | None, resharding: Resharding, between: BetweenSteps, untracked_check: UntrackedStateCheck,
        shadow_step: ShadowStep | None = None, check: RestartCheck | None = None,
    ) -> None:  # fmt: skip
        super().__init__(coordinator, state, reducers, feed, between, untracked_check, check)
        self._recovery, self._resharding, self._shadow_step = recovery, resharding, shadow_step
        self._profile = coordinator.live_profile
        recovery.on_profile(self._profile.ask)
        self._straggler = StragglerDetector(time.monotonic)
        self._shadow_step_done = False  # whether the newest step was a shadow step
        self._last: AnnouncedRound | None = None  # the newest round that this process has trained in

    def begin(self) -> None:
        self._untracked_check.start()
        self._coordinator.track(self._state)
        self._coordinator.check_by(self._recovery.check)
        self._hooks = Hooks(self._state, self._untracked_check.is_untracked)
        alive = self._reducers.alive()
        self._replicas = Replicas(
            self._state, alive, self._untracked_check.is_untracked, shape=self._resharding.shape,
            frees=self._untracked_check.takes_names,
        )  # fmt: skip
        self._compare_before_save(lambda: self._recovery.members.world_size)
        self._scales = Scales(self._state, self._resharding.shape.model_size)
        GradientReduction(self._state, self._reducers, self._untracked_check, lasts=False)
        self._reducers.learn()  # from a backward pass that the script made before
        self._recovery.track(self._state, self._reducers)
        if (rollback := self._recovery.rollback) is not None:
            ranks = Members(self._recovery.main)  # its collectives count as those of the step
            uneven_inputs.gives(lambda source: take_from(self._state, source, ranks, rollback.gradients))
            rollback.listeners = [listener for listener in (self._shadow_step, self._check) if listener is not None]
        if self._shadow_step is not None:
            self._shadow_step.prepare()
        self._enter(Validity.NONE)

    def ready(self) -> bool:
        def due(check: Callable[[], None]) -> None:
            self._all_left_out()
            self._between_steps.run(self._coordinator, self._state, lambda: self._recovery.members, check)

        return self.attempt(due)

    def attempt(self, work: Callable[[Callable[[], None]], None]) -> bool:
        try:
            with self._recovery.program.scope.evaluating():
                work(self._recovery.check)
        except Exception as e:
            if not self.lost(e):
                raise
            if self._between_steps.torn is not None:
                log.warning("a peer was lost in an evaluation, which had moved %s", self._between_steps.torn)
            self._enter(Validity.WHOLE if self._between_steps.torn is None else Validity.TORN)
            return False
        return True

    def step_begins(self) -> int | None:
        self._profile_step(self._recovery.members.rank)
        due = self._shadow_step is not None and self._shadow_step.is_due(self._reducers.can_renew)
        self._recovery.begin(self._coordinator.step, keep=due)
        self._untracked_check.begins()
        self._replicas.begins()
        model = None
        if self._shadow_step is not None:
            assert self._recovery.rollback is not None
            if due and not self._recovery.rollback.kept:
                self._shadow_step.cannot("there is no room for a copy of the tracked state")
            if (model := self._shadow_step.begin()) is not None:
                self._read_as(model)
        if self._check is not None and model is None:
            members = self._recovery.members
            self._check.begin(members.rank, members.world_size)
        return model

    def step_over(self) -> None:
        self._untracked_check.over()
        self._recovery.over()
        if self._shadow_step is not None:
            self._shadow_step.over()
        if self._check is not None:
            self._check.over()

    def step_ended(self) -> bool:
        if self._playing:
            self._shadow_step_ended(None)
            return False
        if self._recovery.ended():
            self._weighted()
            return True
        log.warning("step %d: its block ended well, but a collective in it has failed: the step is lost",
                    self._coordinator.step)  # fmt: skip
        return False

    @property
    def _playing(self) -> bool:
        return self._shadow_step is not None and self._shadow_step.playing

    def step_lost(self, error: BaseException) -> bool:
        if self._playing and isinstance(error, Exception | SystemExit):
            self._shadow_step_ended(None if is_of_lost_peer(error) else error)
            return self._shadow_step is not None and self._shadow_step.leaves(error)
        if self.lost(error):
            return True
        # The script may have caught the error and raised another one. If that was its own mistake, the next attempt
        # shows it.
        is_of_script = isinstance(error, Exception | SystemExit)
        if not is_of_script or self._recovery.round.lost is None or not self._recovery.failed:
            return False
        log.warning(
            "step %d: a collective has failed, and then %r came: the step is lost", self._coordinator.step, error
        )
        return True

    def lost(self, error: BaseException) -> bool:
        return self._recovery.round.lost is not None and is_of_lost_peer(error)

    def completion_read(self) -> None:
        assert self._recovery.rollback is not None
        self._recovery.rollback.completion_read = True

    def _shadow_step_ended(self, error: BaseException | None) -> None:
        """The block of a shadow step has ended. The code behind it runs as after a lost step."""
        assert self._shadow_step is not None
        self._shadow_step.ended(error)
        self._shadow_step_done = True

    def _undo_shadow_step(self) -> None:
        """Undo the changes by the shadow step and by the code behind its block. This process's own step follows."""
        self._shadow_step_done = False
        rollback = self._recovery.rollback
        assert rollback is not None
        validity = self._recovery.roll_back()
        if self._feed is not None:
            self._feed.rewind()
        self._read_as(self._recovery.members.rank)
        rollback.uncount()
        self._untracked_check.uncount()
        assert self._shadow_step is not None
        self._shadow_step.forget_cached()
        with self._shadow_step.alone():
            self._reducers.renew()
        if validity is Validity.TORN:
            log.error("%s, and cannot be put back; this process ends, and a new one takes its place", rollback.torn)
            raise SystemExit(exit_codes.NOT_RECOVERED)

    def go_on(self, phase: Phase) -> None:
        if self._shadow_step_done:
            self._undo_shadow_step()
            return
        validity = Validity.WHOLE
        if phase is Phase.LOST:
            validity = self._recovery.roll_back()
            if self._feed is not None:
                self._feed.rewind()
        self._enter(validity)

    def between(self) -> None:
        if self._recovery.round.to_settle:
            self._enter(Validity.WHOLE)  # the round's members wait for this one, before any other agreement
            return
        try:
            self._completed()
            self._compare()
            updates = gradients.updates if (gradients := self._present_gradients()) is not None else 0
            calls = self._recovery.main.begun
            if self._coordinator.agree(move=self._recovery.round.boundary_wanted, updates=updates, calls=calls):
                if self._recovery.part_leaves():
                    self._coordinator.commit()
                self._enter(Validity.WHOLE)
        except NewerCommit as e:
            self._go_forward(e)
        except RuntimeError as e:
            if not self.lost(e):
                raise
            self.go_on(Phase.DONE)

    def _present_gradients(self) -> Gradients | None:
        return self._recovery.rollback.gradients if self._recovery.rollback is not None else None

    def _check_all(self, check: Callable[..., None]) -> None:
        """Raises `LoopError` on all members if some do not come."""
        try:
            self._recovery.end_together(check, self._coordinator.step)
        except LoopError as e:
            self._recovery.refuse(e)
            self._enter(Validity.TORN)

    def _completed(self, *, last: bool = False) -> None:
        size = self._recovery.members.world_size
        self._compare_ranks(size, last=last)
        if self._shadow_step is not None:
            try:
                self._shadow_step.compare()
            except LoopError as e:
                if self._check is not None and self._recovery.members.rank == 0:
                    self._check.note_refusal(str(e))
                raise
        if self._check is not None:
            self._compare_restart(self._check, size)

    def _compare_restart(self, check: RestartCheck, size: int) -> None:
        """Raises `LoopError` on all members if rank 0's gradients are not those of before the restart."""
        try:
            check.completed()
        except LoopError as e:
            if size == 1:
                raise
            self._recovery.refuse(e)
            self._enter(Validity.TORN)

    def _compare(self) -> None:
        members = self._recovery.members
        if members.world_size == 1:
            return
        straggler = self._straggler.completed(self._recovery.main.waited, self._fetched, members.gather)
        if straggler is None:
            return
        if members.rank == 0:
            log.warning("%s", straggler)
        elif isinstance(straggler, Straggler) and straggler.rank == members.rank:
            log.warning("this is the slow one: %s", straggler)
        if isinstance(straggler, Straggler):
            self._coordinator.slow(str(straggler), straggler.rank)
        else:
            self._coordinator.slow(None)

    @property
    def _fetched(self) -> float:
        """Seconds that this process has waited for batches so far; 0 if the script has a loop without a loader."""
        return self._feed.fetched if self._feed is not None else 0.0

    def finish(self, *, save: bool = True) -> bool:
        if self._recovery.round.to_settle:
            self._enter(Validity.WHOLE)
            return False
        before = self._coordinator.step
        try:
            self._completed(last=True)
            self._coordinator.finish(before, save=save)
        except NewerCommit as e:
            self._go_forward(e)
            return False
        except RuntimeError as e:
            if not self.lost(e):
                raise
            self.go_on(Phase.DONE)
            return False
        self._recovery.end()
        return True

    def _enter(self, validity: Validity) -> None:
        entering: Validity | None = validity  # None: no peer was lost meanwhile
        coordinator, recovery = self._coordinator, self._recovery
        trained = coordinator.step
        try:
            while entering is not None:
                coordinator.step = recovery.enter(coordinator.step, entering, self._start, self._moved)
                entering = self._catch_up(trained)
            if (gradients := self._present_gradients()) is not None:
                gradients.take_left_out()  # the members have one state now, and a new one has not made that step
        except Drained:
            self._recovery.part()
            self._coordinator.part()
        except (NoState, TransferFailed, FormingFailed) as e:
            log.error("%s; this process ends, and a new one takes its place", e)
            raise SystemExit(exit_codes.NOT_RECOVERED) from e

    def _go_forward(self, why: NewerCommit) -> None:
        """Restore, on all members, because others had committed more steps before this world formed than it has."""
        log.warning("%s: all restore it", why)
        try:
            if self._start() is None:
                raise SystemExit(exit_codes.NOT_RECOVERED) from why
            self._reducers.resume()
            agree_on_seeds(self._state, self._recovery.members.gather)
        except RuntimeError as e:
            if not self.lost(e):
                raise
            self._enter(Validity.TORN)

    def _catch_up(self, trained: int) -> Validity | None:
        """Restore the newest commit if it is newer than the members' state. That happens to members that come back
        after others have trained without them, and are gone. `trained`: the step that this member had reached itself.
        Returns the validity of the state if a peer was lost meanwhile, otherwise None."""
        state_validity = Validity.WHOLE
        step, round_ = self._coordinator.step, self._recovery.round.announced
        assert round_ is not None
        try:
            newest = self._coordinator.newest_of_others(self._recovery.members, self._last, round_)
            if newest > step:
                log.warning("the members hold step %d, and step %d is committed: all restore it", step, newest)
                state_validity = Validity.TORN
                if self._start() is None:
                    raise NoState(f"step {newest} is committed, and no commit could be restored")
                self._reducers.resume()
            agree_on_seeds(self._state, self._recovery.members.gather)
            self._between_steps.agree(self._coordinator.step, self._recovery.members)
            if self._shadow_step is not None:
                self._shadow_step.agree(joins=self._coordinator.step != trained, step=self._coordinator.step)
        except RuntimeError as e:
            if not self.lost(e):
                raise
            return state_validity
        self._last = round_
        return None

    def _moved(self) -> None:
        """The round has formed; its members do not have one state yet."""
        members, round_ = self._recovery.members, self._recovery.round.announced
        assert round_ is not None
        self._coordinator.move(members, round_.number, round_.rendezvous)
        self._profile.moved()
        self._between_steps.round_formed(self._coordinator.step, members)
        if (samples := self._state.get(SAMPLES)) is not None:
            samples.moved()
        self._replicas.moved()
        self._scales.moved()
        self._untracked_check.moved()
        self._straggler.moved(self._recovery.main.waited, self._fetched)
        self._read_as(members.rank)
        if self._feed is not None:
            self._feed.moved()

    def _read_as(self, rank: int) -> None:
        world = self._resharding.reshard(rank, self._recovery.members.world_size)
        if self._feed is not None:
            self._feed.reshard(world.rank, world.size)

    def _start(self) -> int | None:
        step = self._coordinator.restore(self._state)
        self._between_steps.nesting.restored()
        return step if self._coordinator.restored else None
