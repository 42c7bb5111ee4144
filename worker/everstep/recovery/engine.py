"""Keeps one training process in the newest round.

    start -> the script builds its objects in a world of one -> enter -> step, step -> a peer is lost -> enter -> step

`CurrentRound` owns the round. This module has the present step. When a peer is lost, the training thread's waits end.
The thread then leaves its step and calls `enter`, which brings the members of the new round to one state.

Invariants: training goes on from the newest state that any member holds whole; a step is repeated only from a state
that is known (`rollback`); all members of a round have the same state when its first step begins.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from everstep.contract.calls import StepStatus, in_group
from everstep.recovery.announcements import AnnouncedRound, Announcements
from everstep.recovery.current_round import CurrentRound
from everstep.recovery.ddp import checks, uneven_inputs
from everstep.recovery.ddp.reducers import Reducers
from everstep.recovery.errors import LoopError
from everstep.recovery.forming import forming
from everstep.recovery.group.in_flight import PeerLost
from everstep.recovery.group.members import Members
from everstep.recovery.group.script_location import ScriptPhase
from everstep.recovery.rollback.rollback import Rollback
from everstep.recovery.sharding import fsdp
from everstep.recovery.sharding.mesh import RecoverableMesh
from everstep.recovery.transfer import divided_optimizers, replicated
from everstep.recovery.transfer.divided_optimizers import NONE_DIVIDED, DividedOptimizers
from everstep.recovery.transfer.replicated import Start
from everstep.recovery.transfer.shard_transfer_plan import NEW
from everstep.recovery.transfer.sharded import ShardedState
from everstep.recovery.validity import Validity

log = logging.getLogger("everstep.train")

RECENT = 64  # steps whose times are kept, to judge whether the next ones are slow


class Recovery:
    """`main` is the program's default group, for its whole life. `members` is for our own collectives."""

    def __init__(self, announcements: Announcements) -> None:
        self.round = CurrentRound(announcements)
        self.on_profile = announcements.on_profile
        self.program = self.round.program
        self.main = self.program.main
        self.members = Members(self.round.control)
        self._sharded: ShardedState | None = None
        self._reducers: Reducers | None = None
        self.rollback: Rollback | None = None
        self._state: Mapping[str, Any] = {}
        self._divided = NONE_DIVIDED
        self._began: tuple[int, float] | None = None  # the present step, and when it began
        self._failures = 0  # how many of the program's collectives had failed when the step began
        self._made = (0, NEW)  # completed steps, and the round in which they were made here or agreed on
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds that the newest steps took

    def start(self, most: int) -> None:
        """Make `main` the default group, of a world of one for now. The job may have up to `most` processes."""
        self.program.begin(most)

    def mesh(self, shards: int, provisional: int, device: str, kind: str) -> Any:
        """The `DeviceMesh` of a job with sharded state. Called once, before `track`."""
        assert self._sharded is None
        made = RecoverableMesh(shards, provisional, device, self.round.control, self.program.for_mesh, kind)
        self._sharded = ShardedState(made, self.members)
        self.program.divide(kind, shards, provisional)
        return made.device_mesh

    def track(self, state: Mapping[str, Any], reducers: Reducers) -> None:
        """Set the training state and the script's DDP objects. Called once, before the first `enter`. Raises
        `NotRecoverable`."""
        fsdp.check(state, self._sharded.mesh.over if self._sharded is not None else None)
        divided_optimizers.check(state, meshed=self._sharded is not None)
        if self._sharded is not None:
            self.round.divide(self._sharded.mesh)
            self._sharded.track(state)
        self._state, self._divided = state, DividedOptimizers(state)
        self._reducers = reducers
        checks.check(reducers.alive(), self.program.model_size, self.program.is_across, state.values())
        may, agreed = (self._vote, self._sharded.may_undo) if self._sharded is not None else (self.check, lambda: True)
        never = divided_optimizers.NO_UNDO if self._divided else ""
        self.rollback = Rollback(state, may, agreed, hears_skips=self._sharded is not None, never=never)
        for group in self.round.programs:
            group.on_begin = self.rollback.collective
        self.round.listen(self.rollback.roll_back_again, self._step_status)

    def begin(self, step: int, *, keep: bool = False) -> None:
        """Step number `step` begins. `keep`: see `Rollback.begin`."""
        assert self.rollback is not None
        self.rollback.begin(step, keep=keep)
        self.program.scope.enter(ScriptPhase.STEP)
        uneven_inputs.step_begins()
        self._failures = self._failed_by_now()
        self._began = (step, time.monotonic())

    def ended(self) -> bool:
        """The step's block has ended without an error. Returns whether none of its collectives failed. Raises
        `LoopError` if the step did something from which recovery is impossible."""
        assert self.rollback is not None
        if self.failed:
            return False
        self.rollback.ended()
        step, sharded = self.rollback.step, self._sharded
        self._made = (step + 1, self.round.number)
        return sharded is None or sharded.may_make(step) or self._all_make(step)

    @property
    def failed(self) -> bool:
        """Whether a collective of the present step has failed, or an optimizer step was refused."""
        return self._failed_by_now() > self._failures

    def _failed_by_now(self) -> int:
        failed = self.rollback.refused if self.rollback is not None else 0
        for group in self.round.programs:
            failed += group.failures
        return failed

    def over(self) -> None:
        """The step's block has ended, with or without an error."""
        self.program.scope.enter(ScriptPhase.BETWEEN)
        if self._began is not None:
            self._recent.append(time.monotonic() - self._began[1])
            self._began = None

    def _step_status(self) -> StepStatus:
        """The step's status for the agent. Called in the thread that hears of rounds."""
        began = self._began
        inner = (group.waits_in() for group in self.round.programs[1:])
        call = self.main.waits_in() or next((in_group(call) for call in inner if call is not None), None)
        waits = call is not None or any(group.waits for group in self.round.groups)
        return StepStatus(began[0] if began else None, waits, max(self._recent, default=0.0), call, self.main.recent())

    def end_together(self, barrier: Callable[..., None], step: int) -> None:
        """Run `barrier`, from the end of the training. It raises `LoopError` unless all members come to it after this
        step."""
        if (formed := self.round.formed) is not None and formed.round.world_size > 1:
            here, slowest = formed.round, max(self._recent, default=0.0)
            barrier(formed.store, here.rank, here.world_size, step, slowest, self.check)

    def refuse(self, why: LoopError) -> None:
        """Make `enter` raise this error on all members of the next round, because none of them can go on."""
        self.round.refuse(why)

    def end(self) -> None:
        """The run is over: no further step follows."""
        self.program.scope.enter(ScriptPhase.OVER)
        if self.rollback is not None:
            self.rollback.end()

    def part(self) -> None:
        """Leave the round for good, so that no other member waits for this process."""
        with contextlib.suppress(forming.FormingFailed):
            self.round.leave("this process leaves")

    def check(self) -> None:
        """Raises `PeerLost` if the round is over. Called before an optimizer step, which the other members may not
        make."""
        self.round.check()

    def roll_back(self) -> Validity:
        """Undo the present step, which failed; returns the validity of this member's state."""
        assert self.rollback is not None
        if self._sharded is not None:
            self._sharded.roll_back()
        if (validity := self.rollback.roll_back()) is Validity.TORN:
            log.warning("a peer was lost%s in the middle of a step: %s", self.main.lost_at, self.rollback.torn)
        return validity

    def part_leaves(self) -> bool:
        """Whether members that are asked to stop take a part of the state along that no other member has. All members
        have agreed to go into the newest round at the end of this step. Collective. Raises `PeerLost`."""
        parts = self._sharded.mesh.shards if self._sharded is not None else 1
        parts = self.members.world_size if self._divided else parts
        if parts == 1:
            return False
        (stays,) = self.members.any([not self.round.ends_here()], parts)
        return self.members.maximum(int(not stays)) > 0

    def enter(self, step: int, validity: Validity, start: Start, moved: Callable[[], None]) -> int:
        """Leave the present round for the newest, and bring all its members to one state; returns its completed steps.

        `moved` is called when the round has formed. Then `start` is called on all members, if none of them has a state.
        Raises `RoundsOver` if no round comes, `NoState` if the state was lost and nothing is committed,
        `TransferFailed` if the state that was sent to this member is damaged, and `Drained` if this process must end
        here.
        """

        def synchronize(round_: AnnouncedRound) -> int:
            os.environ.update(round_.environment)  # before any code of the script reads its place in the world
            if self._sharded is not None:
                # `moved` is collective. Members that voted, and lost the answer, ask for it before all else in a round.
                self._sharded.mesh.move(round_.rank, round_.world_size)
                self._sharded.answer_undecided(step, validity)
            moved()
            met_at = time.monotonic()
            done, how = self._synchronize(step, validity, round_, start)
            self.round.synced(done, met_at, how)
            return done

        return self.round.in_newest(step, synchronize)

    def _synchronize(self, step: int, validity: Validity, round_: AnnouncedRound, start: Start) -> tuple[int, str]:
        assert self._reducers is not None
        assert self.rollback is not None
        if self._sharded is not None:
            done, how = self._sharded.synchronize(step, validity, round_.number, start)
            self.round.open()
        else:
            made = self._made[1] if self._made[0] == step else NEW
            done, how = replicated.synchronize(self._state, self.members, step, validity, start, self._divided, made)
            self._made = (done, round_.number)
        self.rollback.moved()
        # The new state has arrived. If a peer is lost from here on, this member must still return the new step number,
        # so the error is suppressed.
        with contextlib.suppress(PeerLost):
            self._reducers.agree(self.members)
            self.rollback.gradients.add(self.members.any([*self.rollback.gradients.present], self.program.model_size))
        self._reducers.rebuild()
        return done, how

    def _vote(self) -> None:
        """Vote before an optimizer step with sharded state: all members make it, or none. Raises `PeerLost`."""
        assert self._sharded is not None
        assert self.rollback is not None
        step = self.rollback.step
        if self._sharded.may_make(step):
            return  # decided already for the step's first optimizer
        self._sharded.arrived()
        self.check()
        if not (self.rollback.undoes or self._all_make(step)):
            raise PeerLost("a peer was lost while the members voted for this step, and none of them has made it")

    def _all_make(self, step: int) -> bool:
        """Vote for the step; returns whether it is to be made."""
        assert self._sharded is not None
        assert self.rollback is not None
        try:
            self._sharded.vote(step, self.round.number, self.rollback.can_keep(), self.rollback.gradients.update)
            return True
        except PeerLost as e:
            if made := self._decide(step):
                log.info("step %d was made by others before a peer was lost (%s): it is made here too", step + 1, e)
            return made

    def _decide(self, step: int) -> bool:
        """Whether other members of the next round have made the step for which this one voted."""
        sharded = self._sharded
        assert sharded is not None
        made = self.round.in_newest(step, lambda _: sharded.decided())
        self.round.settle_later()
        return made
