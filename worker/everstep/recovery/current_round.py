"""Owns the state of this process's round, and of the next one.

Three kinds of threads call this module. The training thread leaves a round and joins the next: `leave`,
`form_newest`. The thread that hears of rounds abandons the present one, or begins to form the next in the background.
One of gloo's threads reports that a collective has failed. All state on which they decide is kept here, and no other
module sets it.

Invariants: the number of the round only grows; after `leave`, no collective of the round before writes into a tensor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from everstep.contract import env
from everstep.contract.calls import StepStatus
from everstep.recovery.announcements import AnnouncedRound, Announcements, Drained
from everstep.recovery.errors import LoopError
from everstep.recovery.forming import forming
from everstep.recovery.group.in_flight import PeerLost
from everstep.recovery.group.program_groups import ProgramGroups
from everstep.recovery.group.recoverable import RecoverableGroup
from everstep.recovery.sharding.mesh import RecoverableMesh

log = logging.getLogger("everstep.train")

T = TypeVar("T")

# A round that admits new members forms when its present members come to the end of their step. A newer round ends the
# wait.
FORM_SECONDS = 600.0
# Long, because the agent ends the process if no round will come. A spare may wait as long as its job runs.
JOIN_SECONDS = 366 * 24 * 3600.0
ATTEMPTS = 100


class CurrentRound:
    """`program` has the groups that the script uses. `control` is the group for our own agreements and transfers."""

    def __init__(self, announcements: Announcements) -> None:
        self._announcements = announcements
        self._changing = threading.Lock()  # held while groups are attached or abandoned
        self._formed: forming.FormedRound | None = None
        self._number = -1  # of the newest round that this process has begun to join
        self._in_background = BackgroundForming()
        self._heard_at = 0.0  # when this process began to form the round
        self._stuck: forming.FormingFailed | None = None  # a collective of an older round may still write into tensors
        self._to_settle = False
        self._boundary_wanted = False
        self._mesh: RecoverableMesh | None = None
        self._left: Callable[[], None] = _nothing
        self.program = ProgramGroups(self._failed)
        self.control = RecoverableGroup(self._failed)
        if path := os.environ.get(env.CALLS_FILE):
            self.program.main.write_calls(path)

    @property
    def formed(self) -> forming.FormedRound | None:
        """The round that this process is in; None between two rounds."""
        return self._formed

    @property
    def announced(self) -> AnnouncedRound | None:
        """The round that this process is in, as it was announced; None between two rounds."""
        return self._formed.round if self._formed is not None else None

    @property
    def number(self) -> int:
        """The number of the newest round that this process has begun to join."""
        return self._number

    @property
    def to_settle(self) -> bool:
        """Whether the newest round has formed in the middle of a step, for a vote, so that its members must still agree
        on one state."""
        return self._to_settle

    @property
    def boundary_wanted(self) -> bool:
        """Whether a newer round waits for this process to come to the end of a step."""
        return self._boundary_wanted

    @property
    def lost(self) -> str | None:
        """Why collectives of the present round fail; None while they work."""
        for group in self.groups:  # read in each step, where a generator takes as long as all else here
            if (why := group.lost) is not None:
                return why
        return None

    @property
    def programs(self) -> tuple[RecoverableGroup, ...]:
        """The groups in which the script's collectives run, in the order in which they are formed."""
        of_mesh = self._mesh.groups if self._mesh is not None else ()
        return (self.program.main, *of_mesh, *self.program.own)

    @property
    def groups(self) -> tuple[RecoverableGroup, ...]:
        """All groups of a round."""
        return (*self.programs, self.control)

    def divide(self, mesh: RecoverableMesh) -> None:
        """Declare that the state is sharded over this mesh. Called once, before `listen`."""
        self._mesh = mesh

    def listen(self, left: Callable[[], None], step_status: Callable[[], StepStatus]) -> None:
        """Begin to hear of rounds, and to report steps to the agent. `left` is called in the training thread when it
        has left a round."""
        self._left = left
        self._announcements.on_round(self._announced)
        self._announcements.on_step_status(step_status)
        self._announcements.on_over(self.abandon)  # gloo may never report that the members that went on are gone
        self._announcements.ready()

    def check(self) -> None:
        """Raises `PeerLost` if the round is over."""
        if (reason := self.lost) is not None:
            raise PeerLost(reason)

    def in_newest(self, step: int, work: Callable[[AnnouncedRound], T]) -> T:
        """Run `work` in the newest round, once its members have met. If a peer is lost in it, run it again in the next
        one. Raises the errors of `form_newest`, and `FormingFailed` if many rounds in a row do not form."""
        for _ in range(ATTEMPTS):
            round_ = self.form_newest(step)
            if round_ is None:
                continue
            try:
                return work(round_)
            except PeerLost as e:
                self._did_not_come(round_, e)
        raise forming.FormingFailed(f"{ATTEMPTS} rounds in a row did not come about")

    def ends_here(self) -> bool:
        """Whether this process leaves when the others go into the newest round. Waits until that is known."""
        try:
            self._announcements.wait_newer(self._number, JOIN_SECONDS)
        except Drained:
            return True
        return False

    def form_newest(self, step: int) -> AnnouncedRound | None:
        """Form the newest round, so that its members can agree; None if that failed, or if the round does not fit."""
        to_settle, self._to_settle = self._to_settle, False
        if to_settle and self.control.lost is None and self._formed is not None:
            return self._formed.round
        if self._stuck is not None:
            raise self._stuck
        round_ = self._announcements.wait_newer(self._number, JOIN_SECONDS)
        self._heard_at = time.monotonic()
        self.leave("a newer round began")
        self._left()
        self._number, self._boundary_wanted = round_.number, False
        self._announcements.coming(round_.number)
        if self._mesh is not None and not self._mesh.fits(round_):
            self._announcements.joined(round_.number, step, 0.0, 0.0, "waiting for whole replicas")
            return None
        if self._mesh is not None and (why := self._mesh.misplaced(round_)):
            self._stuck = forming.FormingFailed(why)
            raise self._stuck
        try:
            formed = self._in_background.pop(round_.number)
            self._join(formed if formed is not None else self._form(round_))
        except (forming.FormingFailed, PeerLost) as e:
            self._did_not_come(round_, e)
            return None
        return round_

    def open(self) -> None:
        """Let the program's collectives run in the new round. With sharded state, this comes after the members have
        agreed: a member that has voted still has to end its step."""
        with self._changing:
            formed = self._formed
            assert formed is not None
            if self.control.lost is not None:
                return  # collectives still fail; the members have one state, and must report it to the next round
            number, rank, size = formed.round.number, formed.round.rank, formed.round.world_size
            self.program.main.attach(formed.main, rank, size, formed.abort, round_=number)
            self.program.seat_groups(rank, size)
            for group, (inner, abort) in zip(self.programs[1:], formed.parts, strict=True):
                group.attach(inner, group.rank(), group.size(), abort, round_=number)

    def settle_later(self) -> None:
        """The members have met for a vote: the state is settled when the present step is over."""
        self._to_settle = True

    def synced(self, step: int, met_at: float, how: str) -> None:
        """The members have one state, of `step` completed steps; they had met at `met_at`."""
        assert self._formed is not None
        round_, formed, synced_in = self._formed.round, met_at - self._heard_at, time.monotonic() - met_at
        log.info(
            "round %d: rank %d of %d, step %d, formed in %.0f ms, in sync in %.0f ms%s",
            round_.number, round_.rank, round_.world_size, step, formed * 1e3, synced_in * 1e3,
            f", {how}" if how else "",
        )  # fmt: skip
        self._announcements.joined(round_.number, step, formed, synced_in, how)

    def abandon(self, reason: str) -> None:
        """End every collective in flight. May be called in any thread."""
        with self._changing:
            for group in self.groups if self._formed is not None else ():
                group.abandon(reason)

    def leave(self, reason: str) -> None:
        """Leave the round, in the training thread. Afterwards none of its collectives writes into a tensor. Raises
        `FormingFailed` if gloo or a device cannot be stopped."""
        self.abandon(reason)
        with self._changing:
            formed, self._formed = self._formed, None
            works = [work for group in self.groups for work in group.left]
            on_device = [work for group in self.groups for work in group.left_on_device]
        if formed is None:
            self.program.abandon(reason)
            return
        try:
            forming.close(formed, works, on_device)
        except forming.FormingFailed as e:
            self._stuck = e  # kept, because a script in the middle of a step may suppress the error
            raise

    def refuse(self, why: LoopError) -> None:
        """Make the next round fail with `LoopError` on all members, because none of them can go on."""
        self.program.refusal = why
        if (formed := self._formed) is not None:
            self._failed(str(why), formed.round.number)

    def _join(self, formed: forming.FormedRound) -> None:
        with self._changing:
            self._formed = formed
            number, rank, size = formed.round.number, formed.round.rank, formed.round.world_size
            self.control.attach(formed.control, rank, size, round_=number)
        if self._mesh is None:
            self.open()
        if self._overtaken(formed.round.number):
            self.abandon("a newer round began")
            raise PeerLost("a newer round began")

    def _form(self, round_: AnnouncedRound) -> forming.FormedRound:
        of_mesh = self._mesh.parts(round_.rank, round_.world_size) if self._mesh is not None else ()
        parts = (*of_mesh, *self.program.parts(round_.rank, round_.world_size))
        return forming.form(round_, partial(self._overtaken, round_.number), FORM_SECONDS, parts, self.program.made)

    def _overtaken(self, number: int) -> bool:
        if self._announcements.drained:
            return True
        newest = self._announcements.newest()
        return newest is not None and newest.number > number

    def _did_not_come(self, round_: AnnouncedRound, why: Exception) -> None:
        log.warning("round %d did not come about here: %s", round_.number, why)
        self._announcements.broken(round_.number, str(why))

    def _announced(self, round_: AnnouncedRound, whole: bool) -> None:
        """Handle a new round, in the thread that hears of rounds."""
        with self._changing:
            if self._formed is None or self._formed.round.number >= round_.number:
                return  # the training thread knew of it sooner, and leaves by itself
            if not whole or self.lost is not None:
                for group in self.groups:
                    group.abandon(f"round {round_.number} began")
            elif self._mesh is None:
                self._in_background.start(
                    round_.number, partial(self._form, round_), partial(self._formed_in_background, round_.number)
                )
            else:
                self._boundary_wanted = True

    def _formed_in_background(self, number: int) -> None:
        with self._changing:
            self._boundary_wanted = self._boundary_wanted or self._number < number

    def _failed(self, reason: str, number: int) -> None:
        """Handle a failed collective of the round with this number, in one of gloo's threads. The training thread hears
        of it sooner, and may be in the next round by now, which has not failed."""
        with self._changing:
            if self._formed is None or self._formed.round.number != number:
                return
            for group in self.groups:
                group.abandon(reason)
        main = self.program.main
        self._announcements.broken(number, reason, main.recent(), main.lost_at or self.control.lost_at)


class BackgroundForming:
    """Forms a round in a background thread while the members of the last round still train. Thread-safe.

    All change to it at the end of the same step, once it has formed. If a peer of the last round is lost before that,
    nobody can train on: each member waits for its background thread, and changes to the new round then. Invariant: a
    process forms a round only once. The members find each other by entries in the round's store, and a second attempt
    would find those of the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: tuple[int, Future[forming.FormedRound]] | None = None

    def start(self, number: int, form: Callable[[], forming.FormedRound], then: Callable[[], None]) -> None:
        """Begin to form the round. `then` is called in the background thread, whether the round formed or not."""
        future: Future[forming.FormedRound] = Future()
        self._replace((number, future))

        def run() -> None:
            try:
                future.set_result(form())
            except BaseException as e:
                future.set_exception(e)
            then()

        threading.Thread(target=run, name=f"everstep-ahead-{number}", daemon=True).start()

    def pop(self, number: int) -> forming.FormedRound | None:
        """Wait for the round and return it; None if it was not begun. Raises the error of `form`."""
        newest = self._replace(None, keep=number)
        return newest[1].result() if newest is not None else None

    def _replace(
        self, other: tuple[int, Future[forming.FormedRound]] | None, keep: int = -1
    ) -> tuple[int, Future[forming.FormedRound]] | None:
        with self._lock:
            before, self._newest = self._newest, other
        if before is not None and before[0] == keep:
            return before
        if before is not None:
            # In a thread of its own: closing its connections may take seconds, and the caller holds locks.
            name = f"everstep-discard-{before[0]}"
            threading.Thread(target=_discard, args=(before[1],), name=name, daemon=True).start()
        return None


def _discard(forming_round: Future[forming.FormedRound]) -> None:
    """Close the round once it has formed. No collective was begun in it."""
    if forming_round.exception() is None:
        with contextlib.suppress(forming.FormingFailed):
            forming.close(forming_round.result(), [], [])


def _nothing() -> None:
    pass
