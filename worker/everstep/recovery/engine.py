"""Keeps one training process in the newest round.

    start -> the script builds its objects in a world of one -> enter -> step, step -> a peer is lost -> enter -> step

Two threads meet here. The one that hears of rounds abandons the present one: that ends the training thread's waits. The
training thread then leaves its step and calls `enter`, which forms the new round and brings its members to one state.

Invariants: the state that is trained on is the newest that any member holds whole; a step is repeated only
from a state that is known (`rollback`); two members of a round have the same state when its first step begins.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from everstep.contract import env
from everstep.recovery.announcements import AnnouncedRound, Announcements, StepStatus
from everstep.recovery.ddp import checks
from everstep.recovery.ddp.reducers import Reducers
from everstep.recovery.forming import forming
from everstep.recovery.forming.background import BackgroundForming
from everstep.recovery.group.in_flight import PeerLost
from everstep.recovery.group.members import Members
from everstep.recovery.group.program_groups import ProgramGroups
from everstep.recovery.group.recoverable import RecoverableGroup
from everstep.recovery.group.script_location import ScriptPhase
from everstep.recovery.rollback.rollback import Rollback
from everstep.recovery.sharding import fsdp
from everstep.recovery.sharding.mesh import RecoverableMesh
from everstep.recovery.transfer import replicated
from everstep.recovery.transfer.replicated import Start
from everstep.recovery.transfer.sharded import ShardedState
from everstep.recovery.validity import Validity

log = logging.getLogger("everstep.train")

# A round that takes newcomers in forms when its members come to the end of their step. A newer round ends it sooner.
FORM_SECONDS = 600.0
JOIN_SECONDS = 2 * 24 * 3600.0  # the agent knows what is waited for, and ends the process if none will come
ATTEMPTS = 100
_NONE_CAME = f"{ATTEMPTS} rounds in a row did not come about"
RECENT = 64  # steps by which the next ones are judged


class Recovery:
    """`main` is the program's default group, for its whole life; `members` are for us."""

    def __init__(self, announcements: Announcements) -> None:
        self._announcements = announcements
        self._leaving = threading.Lock()
        self._formed: forming.FormedRound | None = None
        self._number = -1
        self._in_background, self._heard_at = BackgroundForming(), 0.0  # when its forming began
        self._stuck: forming.FormingFailed | None = None  # something of a round before may still write into tensors
        self.program = ProgramGroups(self._failed)
        self.main = self.program.main
        if path := os.environ.get(env.CALLS_FILE):
            self.main.write_calls(path)
        self.control = RecoverableGroup(self._failed)
        self.members = Members(self.control)
        self._sharded: ShardedState | None = None
        self.met = False  # the newest round has formed, for `decide`, and is still to be settled
        self.boundary_wanted = False  # a newer round waits for us to come to the end of a step
        self._reducers: Reducers | None = None
        self.rollback: Rollback | None = None
        self._state: Mapping[str, Any] = {}
        self._began: tuple[int, float] | None = None  # the step in hand, and when
        self._failures = 0  # of the program's collectives when it began
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds of steps

    @property
    def round(self) -> AnnouncedRound | None:
        """The round that this process is in."""
        return self._formed.round if self._formed is not None else None

    @property
    def lost(self) -> str | None:
        """Why collectives of the present round fail; None while they work."""
        return next((group.lost for group in self._groups if group.lost is not None), None)

    @property
    def _groups(self) -> tuple[RecoverableGroup, ...]:
        return (*self._programs, self.control)

    @property
    def _programs(self) -> tuple[RecoverableGroup, ...]:
        of_mesh = self._sharded.mesh.groups if self._sharded is not None else ()
        return (self.main, *of_mesh, *self.program.own)

    def start(self, most: int) -> None:
        """Make `main` the default group, of a world of one for now. The job may come to have `most` processes."""
        self.program.begin(most)

    def mesh(self, shards: int, provisional: int, device: str, kind: str) -> Any:
        """The `DeviceMesh` of a job whose state is cut into shards. Once, before `track`."""
        assert self._sharded is None
        made = RecoverableMesh(shards, provisional, device, self.control, self.program.for_mesh, kind)
        self._sharded = ShardedState(made, self.members)
        self.program.divide(kind, shards, provisional)
        return made.device_mesh

    def track(self, state: Mapping[str, Any], reducers: Reducers) -> None:
        """What makes up the training state, and the script's DDP objects. Once, before the first `enter`. Raises
        `NotRecoverable`."""
        fsdp.check(state, self._sharded.mesh.over if self._sharded is not None else None)
        if self._sharded is not None:
            self._sharded.track(state)
        self._state = state
        self._reducers = reducers
        checks.check(reducers.alive(), self.program.places, self.program.is_across)
        may, agreed = (self._vote, self._sharded.may_undo) if self._sharded is not None else (self.check, lambda: True)
        self.rollback = Rollback(state, may, agreed, hears_skips=self._sharded is not None)
        for group in self._programs:
            group.on_begin = self.rollback.collective
        self._announcements.on_round(self._heard)
        self._announcements.on_step_status(self._step_status)
        self._announcements.on_over(self._abandon)  # else gloo may never say that those who went on are gone
        self._announcements.ready()

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
        return sum((self.rollback.refused if self.rollback else 0, *(group.failures for group in self._programs)))

    def over(self) -> None:
        """The step's block has ended, well or not."""
        self.program.scope.enter(ScriptPhase.BETWEEN)
        if self._began is not None:
            self._recent.append(time.monotonic() - self._began[1])
            self._began = None

    def _step_status(self) -> StepStatus:
        """In the thread that hears of rounds."""
        began = self._began
        call = self.main.waits_in()
        waits = call is not None or any(group.waits for group in self._groups)
        return StepStatus(began[0] if began else None, waits, max(self._recent, default=0.0), call, self.main.recent())

    def all_meet(self, meet: Callable[..., None], step: int) -> None:
        """`meet`, of `ending`, raises `LoopError` unless all members come to it after this step."""
        if (formed := self._formed) is not None and formed.round.world_size > 1:
            here, slowest = formed.round, max(self._recent, default=0.0)
            meet(formed.store, here.rank, here.world_size, step, slowest, self.check)

    def refuse(self, why: str) -> None:
        """No member can go on: to `enter` the next round raises `LoopError` on all of them."""
        self.program.refusal = why
        self._failed(why)

    def end(self) -> None:
        """No step is taken any more."""
        self.program.scope.enter(ScriptPhase.OVER)
        if self.rollback is not None:
            self.rollback.end()

    def part(self) -> None:
        """This process does not go on: leave the round, so that nothing of it is waited for."""
        with contextlib.suppress(forming.FormingFailed):
            self._leave("this process leaves")

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
        for _ in range(ATTEMPTS):
            round_ = self._meet(step)
            if round_ is None:
                continue
            os.environ.update(round_.environment)  # before anything of the script's reads where it is
            try:
                moved()
                made = time.monotonic()
                found, done = self._settle(step, validity, round_, start)
            except PeerLost as e:
                self._did_not_come(round_, e)
                continue
            formed, settled = made - self._heard_at, time.monotonic() - made
            log.info(
                "round %d: rank %d of %d, step %d, formed in %.0f ms, in sync in %.0f ms%s",
                round_.number, round_.rank, round_.world_size, found, formed * 1e3, settled * 1e3,
                f", {done}" if done else "",
            )  # fmt: skip
            self._announcements.joined(round_.number, found, formed, settled, done)
            return found
        raise forming.FormingFailed(_NONE_CAME)

    def _meet(self, step: int) -> AnnouncedRound | None:
        """Form the newest round, so that its members can agree; None if that failed, or is of no use."""
        met, self.met = self.met, False
        if met and self.control.lost is None and self._formed is not None:
            return self._formed.round
        if self._stuck is not None:
            raise self._stuck
        round_ = self._announcements.wait_newer(self._number, JOIN_SECONDS)
        self._heard_at = time.monotonic()
        self._leave("a newer round began")
        if self.rollback is not None:
            self.rollback.roll_back_again()
        self._number, self.boundary_wanted = round_.number, False
        self._announcements.coming(round_.number)
        mesh = self._sharded.mesh if self._sharded is not None else None
        if mesh is not None and not mesh.fits(round_):
            self._announcements.joined(round_.number, step, 0.0, 0.0, "waiting for whole replicas")
            return None
        if mesh is not None and (why := mesh.misplaced(round_)):
            self._stuck = forming.FormingFailed(why)
            raise self._stuck
        try:
            formed = self._in_background.take(round_.number)
            self._join(formed if formed is not None else self._form(round_))
        except (forming.FormingFailed, PeerLost) as e:
            self._did_not_come(round_, e)
            return None
        return round_

    def _form(self, round_: AnnouncedRound) -> forming.FormedRound:
        of_mesh = self._sharded.mesh.parts(round_.rank, round_.world_size) if self._sharded is not None else ()
        parts = (*of_mesh, *self.program.parts(round_.rank, round_.world_size))
        return forming.form(round_, partial(self._overtaken, round_.number), FORM_SECONDS, parts, self.program.made)

    def _did_not_come(self, round_: AnnouncedRound, why: Exception) -> None:
        log.warning("round %d did not come about here: %s", round_.number, why)
        self._announcements.broken(round_.number, str(why))

    def _settle(self, step: int, validity: Validity, round_: AnnouncedRound, start: Start) -> tuple[int, str]:
        assert self._reducers is not None
        assert self.rollback is not None
        if self._sharded is not None:
            self._sharded.mesh.move(round_.rank, round_.world_size)
            found, done = self._sharded.settle(step, validity, round_.number, start)
            self._open()
        else:
            found, done = replicated.settle(self._state, self.members, step, validity, start)
        self.rollback.moved()
        # The state has come: a peer lost from here on must not let this member tell its old step number with it.
        with contextlib.suppress(PeerLost):
            self._reducers.agree(self.members)
            self.rollback.gradients.add(self.members.any([*self.rollback.gradients.present], self.program.places))
        self._reducers.rebuild()
        return found, done

    def _join(self, formed: forming.FormedRound) -> None:
        rank, size = formed.round.rank, formed.round.world_size
        with self._leaving:
            self._formed = formed
            self.control.attach(formed.control, rank, size)
        if self._sharded is None:
            self._open()
        if self._overtaken(formed.round.number):
            self._abandon("a newer round began")
            raise PeerLost("a newer round began")

    def _open(self) -> None:
        """The program's collectives work from now on. Of sharded state not before the members have agreed: one that has
        voted still ends its step."""
        with self._leaving:
            formed = self._formed
            assert formed is not None
            if self.control.lost is not None:
                return  # and they fail still: the members are at one state, and must not tell the next round another
            self.main.attach(formed.main, formed.round.rank, formed.round.world_size, formed.abort)
            self.program.place(formed.round.rank, formed.round.world_size)
            for group, (inner, abort) in zip(self._programs[1:], formed.parts, strict=True):
                group.attach(inner, group.rank(), group.size(), abort)

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
            self._sharded.vote(step, self._number, self.rollback.can_keep(), self.rollback.gradients.update)
            return True
        except PeerLost as e:
            if made := self._decide(step):
                log.info("step %d was made by others before a peer was lost (%s): it is made here too", step + 1, e)
            return made

    def _decide(self, step: int) -> bool:
        """Whether other members of the next round have made the step that this one voted for."""
        assert self._sharded is not None
        for _ in range(ATTEMPTS):
            round_ = self._meet(step)
            if round_ is None:
                continue
            try:
                made = self._sharded.decided()
            except PeerLost as e:
                self._did_not_come(round_, e)
                continue
            self.met = True
            return made
        raise forming.FormingFailed(_NONE_CAME)

    def _overtaken(self, number: int) -> bool:
        if self._announcements.drained:
            return True
        newest = self._announcements.newest()
        return newest is not None and newest.number > number

    def check(self) -> None:
        """Raises `PeerLost` if the round is over. Before an optimizer's step: the other members may go without it."""
        if (reason := self.lost) is not None:
            raise PeerLost(reason)

    def _heard(self, round_: AnnouncedRound, whole: bool) -> None:
        """In the thread that hears of rounds."""
        with self._leaving:
            if self._formed is None or self._formed.round.number >= round_.number:
                return  # the training thread has heard of it sooner, and leaves, or has left, by itself
            if not whole or self.lost is not None:
                for group in self._groups:
                    group.abandon(f"round {round_.number} began")
            elif self._sharded is None:
                self._in_background.start(
                    round_.number, partial(self._form, round_), partial(self._formed_in_background, round_.number)
                )
            else:
                self.boundary_wanted = True

    def _formed_in_background(self, number: int) -> None:
        with self._leaving:
            self.boundary_wanted = self.boundary_wanted or self._number < number

    def _failed(self, reason: str) -> None:
        """In one of gloo's threads: a collective failed before we heard of anything."""
        formed = self._formed
        self._abandon(reason)
        if formed is not None:
            at = self.main.lost_at or self.control.lost_at
            self._announcements.broken(formed.round.number, reason, self.main.recent(), at)

    def _abandon(self, reason: str) -> None:
        with self._leaving:
            for group in self._groups if self._formed is not None else ():
                group.abandon(reason)

    def _leave(self, reason: str) -> None:
        """In the training thread: nothing of the round before is felt afterwards."""
        self._abandon(reason)
        with self._leaving:
            formed, self._formed = self._formed, None
            works = [work for group in self._groups for work in group.left]
            on_device = [work for group in self._groups for work in group.left_on_device]
        if formed is None:
            self.program.abandon(reason)
            return
        try:
            forming.close(formed, works, on_device)
        except forming.FormingFailed as e:
            self._stuck = e  # a script that is in its step may keep the error to itself
            raise
