"""Keeps one training process in the newest round.

    start -> the script builds its objects in a world of one -> enter -> step, step -> a peer is lost -> enter -> step

`CurrentRound` has the round itself. This has the step in hand, and what its loss is worth: a lost peer ends the waits
of the training thread, which then leaves its step and calls `enter`; that brings the members of the new round to one
state.

Invariants: the state that is trained on is the newest that any member holds whole; a step is repeated only
from a state that is known (`rollback`); two members of a round have the same state when its first step begins.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from everstep.contract.calls import in_group
from everstep.recovery.announcements import AnnouncedRound, Announcements, StepStatus
from everstep.recovery.current_round import CurrentRound
from everstep.recovery.ddp import checks
from everstep.recovery.ddp.reducers import Reducers
from everstep.recovery.forming import forming
from everstep.recovery.group.in_flight import PeerLost
from everstep.recovery.group.members import Members
from everstep.recovery.group.script_location import ScriptPhase
from everstep.recovery.rollback.rollback import Rollback
from everstep.recovery.sharding import fsdp
from everstep.recovery.sharding.mesh import RecoverableMesh
from everstep.recovery.transfer import replicated
from everstep.recovery.transfer.replicated import Start
from everstep.recovery.transfer.sharded import ShardedState
from everstep.recovery.validity import Validity

log = logging.getLogger("everstep.train")

RECENT = 64  # steps by which the next ones are judged


class Recovery:
    """`main` is the program's default group, for its whole life; `members` are for us."""

    def __init__(self, announcements: Announcements) -> None:
        self._round = CurrentRound(announcements)
        self.program = self._round.program
        self.main = self.program.main
        self.members = Members(self._round.control)
        self._sharded: ShardedState | None = None
        self._reducers: Reducers | None = None
        self.rollback: Rollback | None = None
        self._state: Mapping[str, Any] = {}
        self._began: tuple[int, float] | None = None  # the step in hand, and when
        self._failures = 0  # of the program's collectives when it began
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds of steps

    @property
    def round(self) -> AnnouncedRound | None:
        """The round that this process is in."""
        return formed.round if (formed := self._round.formed) is not None else None

    @property
    def lost(self) -> str | None:
        """Why collectives of the present round fail; None while they work."""
        return self._round.lost

    @property
    def to_settle(self) -> bool:
        """See `CurrentRound.to_settle`."""
        return self._round.to_settle

    @property
    def boundary_wanted(self) -> bool:
        """See `CurrentRound.boundary_wanted`."""
        return self._round.boundary_wanted

    def start(self, most: int) -> None:
        """Make `main` the default group, of a world of one for now. The job may come to have `most` processes."""
        self.program.begin(most)

    def mesh(self, shards: int, provisional: int, device: str, kind: str) -> Any:
        """The `DeviceMesh` of a job whose state is cut into shards. Once, before `track`."""
        assert self._sharded is None
        made = RecoverableMesh(shards, provisional, device, self._round.control, self.program.for_mesh, kind)
        self._sharded = ShardedState(made, self.members)
        self.program.divide(kind, shards, provisional)
        return made.device_mesh

    def track(self, state: Mapping[str, Any], reducers: Reducers) -> None:
        """What makes up the training state, and the script's DDP objects. Once, before the first `enter`. Raises
        `NotRecoverable`."""
        fsdp.check(state, self._sharded.mesh.over if self._sharded is not None else None)
        if self._sharded is not None:
            self._round.divide(self._sharded.mesh)
            self._sharded.track(state)
        self._state = state
        self._reducers = reducers
        checks.check(reducers.alive(), self.program.places, self.program.is_across)
        may, agreed = (self._vote, self._sharded.may_undo) if self._sharded is not None else (self.check, lambda: True)
        self.rollback = Rollback(state, may, agreed, hears_skips=self._sharded is not None)
        for group in self._round.programs:
            group.on_begin = self.rollback.collective
        self._round.listen(self.rollback.roll_back_again, self._step_status)

    def begin(self, step: int, *, keep: bool = False) -> None:
        """Step number `step` begins. `keep`: see `Rollback.begin`."""
        assert self.rollback is not None
        self.rollback.begin(step, keep=keep)
        self.program.scope.enter(ScriptPhase.STEP)
        self._failures = self._failed_by_now()
        self._began = (step, time.monotonic())

    def ended(self) -> bool:
        """The step's block has ended without an error: whether none of its collectives has failed. Raises `LoopError`
        for what could not be recovered from."""
        assert self.rollback is not None
        if self.failed:
            return False
        self.rollback.ended()
        step, sharded = self.rollback.step, self._sharded
        return sharded is None or sharded.may_make(step) or self._all_make(step)

    @property
    def failed(self) -> bool:
        """Whether a collective of the step in hand has failed, or an optimizer was refused its step."""
        return self._failed_by_now() > self._failures

    def _failed_by_now(self) -> int:
        return sum((self.rollback.refused if self.rollback else 0, *(group.failures for group in self._round.programs)))

    def over(self) -> None:
        """The step's block has ended, well or not."""
        self.program.scope.enter(ScriptPhase.BETWEEN)
        if self._began is not None:
            self._recent.append(time.monotonic() - self._began[1])
            self._began = None

    def _step_status(self) -> StepStatus:
        """In the thread that hears of rounds."""
        began = self._began
        inner = (group.waits_in() for group in self._round.programs[1:])
        call = self.main.waits_in() or next((in_group(call) for call in inner if call is not None), None)
        waits = call is not None or any(group.waits for group in self._round.groups)
        return StepStatus(began[0] if began else None, waits, max(self._recent, default=0.0), call, self.main.recent())

    def all_meet(self, meet: Callable[..., None], step: int) -> None:
        """`meet`, of `ending`, raises `LoopError` unless all members come to it after this step."""
        if (formed := self._round.formed) is not None and formed.round.world_size > 1:
            here, slowest = formed.round, max(self._recent, default=0.0)
            meet(formed.store, here.rank, here.world_size, step, slowest, self.check)

    def refuse(self, why: str) -> None:
        """No member can go on: to `enter` the next round raises `LoopError` on all of them."""
        self._round.refuse(why)

    def end(self) -> None:
        """No step is taken any more."""
        self.program.scope.enter(ScriptPhase.OVER)
        if self.rollback is not None:
            self.rollback.end()

    def part(self) -> None:
        """This process does not go on: leave the round, so that nothing of it is waited for."""
        with contextlib.suppress(forming.FormingFailed):
            self._round.leave("this process leaves")

    def check(self) -> None:
        """Raises `PeerLost` if the round is over. Before an optimizer's step: the other members may go without it."""
        self._round.check()

    def roll_back(self) -> Validity:
        """The step in hand failed: what this member's state is worth now."""
        assert self.rollback is not None
        if self._sharded is not None:
            self._sharded.roll_back()
        if (validity := self.rollback.roll_back()) is Validity.TORN:
            log.warning("a peer was lost%s in the middle of a step: %s", self.main.lost_at, self.rollback.torn)
        return validity

    def enter(self, step: int, validity: Validity, start: Start, moved: Callable[[], None]) -> int:
        """Leave the present round for the newest, and bring all its members to one state; its completed steps.

        `moved` is called when the round has formed; then `start`, on all members, if none of them has a state. Raises
        `RoundsOver` if no round comes, `NoState` if the state was lost and nothing is committed, `TransferFailed` if
        what this member was sent is damaged, `Drained` if this process is to end here.
        """

        def settle(round_: AnnouncedRound) -> int:
            os.environ.update(round_.environment)  # before anything of the script's reads where it is
            moved()
            met_at = time.monotonic()
            found, how = self._settle(step, validity, round_, start)
            self._round.settled(found, met_at, how)
            return found

        return self._round.in_newest(step, settle)

    def _settle(self, step: int, validity: Validity, round_: AnnouncedRound, start: Start) -> tuple[int, str]:
        assert self._reducers is not None
        assert self.rollback is not None
        if self._sharded is not None:
            self._sharded.mesh.move(round_.rank, round_.world_size)
            found, how = self._sharded.settle(step, validity, round_.number, start)
            self._round.open()
        else:
            found, how = replicated.settle(self._state, self.members, step, validity, start)
        self.rollback.moved()
        # The state has come: a peer lost from here on must not let this member tell its old step number with it.
        with contextlib.suppress(PeerLost):
            self._reducers.agree(self.members)
            self.rollback.gradients.add(self.members.any([*self.rollback.gradients.present], self.program.places))
        self._reducers.rebuild()
        return found, how

    def _vote(self) -> None:
        """Before an optimizer's step, with sharded state: it is made by all members or by none. Raises `PeerLost`."""
        assert self._sharded is not None
        assert self.rollback is not None
        step = self.rollback.step
        if self._sharded.may_make(step):
            return  # as it was for the step's first optimizer
        self._sharded.arrived()
        self.check()
        if not (self.rollback.undoes or self._all_make(step)):
            raise PeerLost("a peer was lost while the members voted for this step, and none of them has made it")

    def _all_make(self, step: int) -> bool:
        """Vote for it, and hear whether it is made."""
        assert self._sharded is not None
        assert self.rollback is not None
        try:
            self._sharded.vote(step, self._round.number, self.rollback.can_keep(), self.rollback.gradients.update)
            return True
        except PeerLost as e:
            if made := self._decide(step):
                log.info("step %d was made by others before a peer was lost (%s): it is made here too", step + 1, e)
            return made

    def _decide(self, step: int) -> bool:
        """Whether other members of the next round have made the step that this one voted for."""
        sharded = self._sharded
        assert sharded is not None
        made = self._round.in_newest(step, lambda _: sharded.decided())
        self._round.settle_later()
        return made
