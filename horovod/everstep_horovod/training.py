"""`hvd.elastic.run`: a function that goes on from the last commit when the world changes.

    snapshot -> join the newest round -> one state -> the function -> a peer is lost -> snapshot -> …

The newest commit that any member has wins, whichever its rank is. Horovod takes rank 0's, and here a new process may be
rank 0. Invariants: the function begins with the same state on all ranks, that of one commit; nothing that came after
the commit is left of it (parameters, optimizer, sampler, values, random numbers); a commit is made only if all
collectives before it have succeeded.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NoReturn

from everstep.checkpoint.errors import NewerCommit
from everstep.contract import exit_codes
from everstep.contract.refusal import count_step
from everstep.recovery.announcements import AnnouncedRound, Drained, run_complete
from everstep.recovery.errors import LoopError
from everstep.recovery.forming.forming import FormingFailed
from everstep.recovery.state.randomness import STATE, Randomness
from everstep.recovery.transfer import replicated
from everstep.recovery.transfer.agreement import NoState
from everstep.recovery.transfer.broadcast import TransferFailed
from everstep.recovery.validity import Validity
from everstep_horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from everstep_horovod.snapshot import Snapshot
from everstep_horovod.state import TorchState
from everstep_horovod.world import Fixed, Rounds, current

log = logging.getLogger("everstep.train")

EPOCH = 1 << 20  # between the numbers of random draws in two epochs; more commits than that are made in none

_ran: list[TorchState] = []


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the function that trains; its first argument is a `TorchState`. It is called again from the last commit
    when a peer was lost, and when a process has come. It returns None in a run that had ended before."""

    @functools.wraps(function)
    def wrapper(state: TorchState, *arguments: Any, **options: Any) -> Any:
        if not isinstance(state, TorchState):
            raise LoopError(f"{function.__name__}({type(state).__name__}): its first argument is a TorchState")
        if _ran:
            raise LoopError(
                f"{function.__name__}(state): a function of hvd.elastic.run was called before, and a process that "
                "comes later would begin with that one. Put all training into one function"
            )
        _ran.append(state)
        return Training(current(), state).run(lambda: function(state, *arguments, **options))

    return wrapper


class Training:
    """One call of such a function."""

    def __init__(self, world: Fixed | Rounds, state: TorchState) -> None:
        self._world, self._target = world, state
        self._coordinator = world.coordinator
        self._random = Randomness(True, world.device)
        self._state = state._tracked
        self._state[STATE] = self._random
        self._commits = 0
        self._averaged = 0  # how often gradients were averaged up to the commit
        self._goes_on = False  # the function was called from a commit, and has made none since
        self._validity = Validity.NONE
        self._last: AnnouncedRound | None = None  # the newest round in which this process has trained
        self._again = False  # whether the function is to be called again in the present round
        object.__setattr__(state, "_commits", self)

    def run(self, call: Callable[[], Any]) -> Any:
        """Call the function until it ends in a world that is whole. Returns its result."""
        self._target._check()
        coordinator = self._coordinator
        coordinator.track(self._state)
        self._random.start()
        self._snapshot = Snapshot(self._state)
        self._world.begin()
        coordinator.check_by(self._world.check_peers)
        self._world.draw_again = self._draw_again
        coordinator.watch()
        result, newer = None, False
        try:
            while True:
                self._enter(newer=newer)
                try:
                    if self._target._finished:
                        log.warning(
                            "commit %d is of a run that had ended, so its function is not called again; another run "
                            "needs another checkpoint URL", self._commits
                        )  # fmt: skip
                    else:
                        result = call()
                    self._finish()
                    return result
                except HostsUpdatedInterrupt:
                    newer = True
                except Exception as e:
                    newer = not self._again
                    if newer and not self._world.lost(e):
                        raise
                    self._again = False
                    log.warning("back to commit %d, because a peer was lost: %s", self._commits, e)
        finally:
            coordinator.leave()
            self._world.progress(None)

    # --- what the state asks for

    def commit(self) -> None:
        self._check()
        if self._is_repeated():
            self._draw()
            return
        self._take()
        leave = self._collective(lambda: self._coordinator.agree(move=self._world.wanted, calls=self._world.begun))
        if leave:
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        self._check()
        self._take()

    def _check(self) -> None:
        if self._target._finished:
            raise LoopError("state.commit() behind the function of hvd.elastic.run: the run is over")
        if name := self._target._pending():
            raise LoopError(
                f"state.commit() between loss.backward() and {name}.step(): no commit holds gradients, so they would "
                "be lost with a peer. Commit behind the step"
            )

    def restore(self) -> None:
        self._snapshot.restore(self._state)
        self._target._forget_gradients()

    def check_host_updates(self) -> None:
        """Nothing happens while there are gradients that no step has used, because they would be lost. The next call,
        after the step, does it."""
        flags = [self._world.wanted, bool(self._target._pending())]
        wanted, pending = self._collective(lambda: self._world.members.any(flags))
        if wanted and not pending:
            self.save()
            raise HostsUpdatedInterrupt

    def _is_repeated(self) -> bool:
        """Whether this is the commit from which the function goes on. A function that commits before each batch makes
        this commit again when it is called again. If it counted, all later commits would have other numbers, and so
        other random numbers."""
        if not self._goes_on:
            return False
        self._goes_on = False
        changed = self._trained or not self._snapshot.shows(self._state)
        return not self._collective(lambda: self._world.members.any([changed])[0])

    @property
    def _trained(self) -> bool:
        """Whether gradients were averaged since the commit."""
        return self._target._averaged() != self._averaged

    def _take(self) -> None:
        if self._world.lost():
            # The script may have caught the error, and the state may have come of sums that were never made.
            raise HorovodInternalError("a collective has failed before this commit (PeerLost)")
        self._snapshot, self._averaged = Snapshot(self._state), self._target._averaged()
        self._commits, self._goes_on = self._commits + 1, False
        count_step()
        self._coordinator.count(self._commits)
        self._world.progress(self._commits)
        self._draw()

    def _draw(self) -> None:
        """Set the random generators as they are after this commit. If a script commits in some epochs alone, each
        epoch still draws its own numbers."""
        epochs = sum(sampler.epoch for sampler in self._target._samplers())
        self._random.begin(self._commits + epochs * EPOCH, self._world.rank)

    def _draw_again(self) -> None:
        """A loop over samples begins. A function that is called again may have drawn other numbers before it."""
        if not self._trained:  # else each loop since the commit would begin with the same numbers
            self._draw()

    def _finish(self) -> None:
        """The function has ended here. The state is what it left, also behind its last commit."""
        if not self._target._finished:
            object.__setattr__(self._target, "_finished", True)
            self._take()
        self._collective(lambda: self._coordinator.finish(self._commits))
        run_complete()

    def _collective(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except NewerCommit as e:
            log.warning("%s: all restore it", e)
            self._validity, self._again = Validity.TORN, True
            raise HorovodInternalError(str(e)) from e
        except RuntimeError as e:
            if not self._world.lost(e):
                raise
            raise HorovodInternalError(f"a peer was lost (PeerLost: {e})") from e

    # --- into a round

    def _enter(self, *, newer: bool) -> None:
        try:
            self._world.enter(self._commits, self._synchronize, newer=newer)
        except Drained:
            self._world.part()
            self._coordinator.part()
        except (NoState, TransferFailed, FormingFailed) as e:
            self._give_up(e)

    def _give_up(self, why: Exception) -> NoReturn:
        log.error("%s; this process ends, and a new one takes its place", why)
        raise SystemExit(exit_codes.NOT_RECOVERED) from why

    def _synchronize(self, round_: AnnouncedRound | None) -> str:
        """Give all members one state. If a peer is lost meanwhile, the snapshot and its number stay as they were."""
        self.restore()
        members, coordinator = self._world.members, self._coordinator
        if round_ is not None:
            coordinator.move(members, round_.number, round_.rendezvous)
        if self._last is not None:
            self._target.on_reset()
        loaded: list[int] = []

        def load() -> int | None:
            step = coordinator.restore(self._state)
            if not coordinator.restored:
                return None
            loaded.append(step)
            return step

        commits, how = replicated.synchronize(self._state, members, self._commits, self._validity, load)
        if round_ is not None and (newest := coordinator.newest_of_others(members, self._last, round_)) > commits:
            log.warning("the members hold commit %d, and %d is saved: all restore it", commits, newest)
            if (restored := load()) is None:
                raise NoState(f"commit {newest} is saved, and could not be restored")
            commits = restored
        if members.maximum(len(loaded)):
            self._target.on_reset()
        self._random.agree(members.gather)
        for sampler in self._target._samplers():
            sampler.reset()
        self._snapshot, self._averaged = Snapshot(self._state), self._target._averaged()
        self._commits, self._validity, self._last = commits, Validity.WHOLE, round_
        self._goes_on = commits > 0
        coordinator.step = commits
        self._world.progress(commits)
        self._draw()
        return how
