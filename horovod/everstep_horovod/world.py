"""The world of a Horovod script in this process: `hvd.init`, and who else is there.

There are two kinds. A script that uses `hvd.elastic` under everstep-run is in the newest round of its agent, and may go
on in the next one (`Rounds`). Any other script is in a process group that is made once (`Fixed`): if a peer is lost,
its launcher starts all processes again.

Which kind it is must be known in `init`, because the agent treats them differently; the script's text says it.
Invariant: a process is in one world, from `init` to its end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from everstep.contract import env
from everstep.contract.calls import StepStatus, in_group
from everstep.instruments.live_profile import LiveProfile
from everstep.recovery.announcements import AnnouncedRound, Announcements, Drained
from everstep.recovery.current_round import CurrentRound
from everstep.recovery.errors import LoopError
from everstep.recovery.forming.forming import FormingFailed
from everstep.recovery.group.in_flight import PeerLost, is_of_lost_peer
from everstep.recovery.group.members import Members
from everstep.recovery.group.script_location import ScriptPhase
from everstep.storage import RetryingStore, open_store
from everstep.train.coordination import step_coordinator
from everstep.train.coordination.group_shutdown import leave_group
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.train.process_place import most_processes, take_place
from everstep_horovod.script import uses_elastic

# Gives the members of a round one state; returns a text that tells where it came from.
Synchronize = Callable[[AnnouncedRound | None], str]


class World(Protocol):
    """What collectives and the elastic loop need of it."""

    draw_again: Callable[[], None]  # sets the random generators as they were after the last commit
    # The process group of gradients alone: a rank that has no gradient for some parameter sends its bucket later than
    # others, in `step`. In the group of the script's collectives, its bucket would be combined with one of those.
    gradients: Any

    live_profile: LiveProfile

    @property
    def coordinator(self) -> StepCoordinator: ...

    @property
    def members(self) -> Members: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def wanted(self) -> bool:
        """Whether a newer round waits for the end of a step."""
        ...

    @property
    def begun(self) -> int:
        """How many collectives the script has begun; 0 if nobody counts them."""
        ...

    def check(self, name: str) -> None:
        """Raises `LoopError` if the script may not run the collective `name` now."""
        ...

    def lost(self, error: BaseException | None = None) -> bool:
        """Whether a peer was lost since the round began, and `error` may have come of it."""
        ...

    def check_peers(self) -> None:
        """Raises `PeerLost` if a peer was lost."""
        ...

    def part(self) -> None:
        """Leave the world for good, while the others go on."""
        ...

    def begin(self) -> None:
        """The function of `hvd.elastic.run` begins."""
        ...

    def progress(self, step: int | None) -> None:
        """`step` commits are made; None: the function has ended."""
        ...

    def enter(self, step: int, synchronize: Synchronize, *, newer: bool) -> None:
        """Call `synchronize` in the present round, or in a newer one."""
        ...


class Fixed:
    """A process group that is made once; a world of one without a launcher."""

    def __init__(self) -> None:
        process = take_place()
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            atexit.register(_leave)
        elif process.made:
            atexit.register(_leave)
        self.device = process.device
        self.gradients: Any = dist.new_group()
        self.live_profile = LiveProfile(_put if os.environ.get(env.CHECKPOINT_URL) else None)
        step_coordinator.listen(self.live_profile, lambda: None)
        atexit.register(self.live_profile.close)
        self._members: Members | None = None
        self._coordinator: StepCoordinator | None = None
        self.draw_again: Callable[[], None] = _nothing

    @property
    def members(self) -> Members:
        """Made on first use, on all ranks: only elastic scripts need it."""
        if self._members is None:
            group: Any = dist.new_group(backend="gloo")
            self._members = Members(group)
        return self._members

    @property
    def coordinator(self) -> StepCoordinator:
        if self._coordinator is None:
            self._coordinator = StepCoordinator.find(None, None, None, {})
            self._coordinator.join()
        return self._coordinator

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @property
    def wanted(self) -> bool:
        return False

    @property
    def begun(self) -> int:
        return 0

    def check(self, name: str) -> None:
        """Every collective is allowed at any time: all processes run the script from its beginning."""

    def lost(self, error: BaseException | None = None) -> bool:
        return False

    def check_peers(self) -> None: ...

    def part(self) -> None: ...

    def begin(self) -> None: ...

    def progress(self, step: int | None) -> None: ...

    def enter(self, step: int, synchronize: Synchronize, *, newer: bool) -> None:
        synchronize(None)


class Rounds:
    """The newest round of an agent. Before `begin` no collective of the script runs: a process that comes later would
    run it while the others train."""

    def __init__(self, announcements: Announcements) -> None:
        self._round = CurrentRound(announcements)
        self._round.program.begin(most_processes())
        self.gradients: Any = dist.new_group()
        self._round.program.scope.enter(ScriptPhase.OVER)  # `check` judges in its place
        self.members = Members(self._round.control)
        self.device = take_place().device
        self.coordinator = StepCoordinator.find(None, None, None, {})
        self.coordinator.join()
        self.live_profile = self.coordinator.live_profile
        announcements.on_profile(self.live_profile.ask)
        self.draw_again: Callable[[], None] = _nothing
        self._began = False
        self._step: int | None = None
        self._at, self._slowest = time.monotonic(), 0.0
        self._round.listen(lambda: None, self._status)
        try:
            self._round.in_newest(0, self._set_environment)
        except Drained:
            self.coordinator.part()

    @property
    def rank(self) -> int:
        return self._round.program.main.getRank()

    @property
    def size(self) -> int:
        return self._round.program.main.getSize()

    @property
    def wanted(self) -> bool:
        return self._round.boundary_wanted

    @property
    def begun(self) -> int:
        return self._round.program.main.begun

    def check(self, name: str) -> None:
        if not self._began:
            raise LoopError(
                f"hvd.{name}() before the function of hvd.elastic.run: a process that comes later would run it while "
                "the others train, and wait for ever. Move it into that function; hvd.elastic.run itself gives all "
                "processes the parameters and the optimizer's state. If this run does not use hvd.elastic.run, "
                f"set {env.HOROVOD_ELASTIC}=0"
            )

    def lost(self, error: BaseException | None = None) -> bool:
        lost = self._round.lost
        if lost is None or error is None:
            return lost is not None
        # A script may have caught the error and raised its own. If that was its mistake, the next attempt shows it.
        return is_of_lost_peer(error) or not isinstance(error, LoopError)

    def check_peers(self) -> None:
        self._round.check()

    def part(self) -> None:
        with contextlib.suppress(FormingFailed):
            self._round.leave("this process leaves")

    def begin(self) -> None:
        self._began = True

    def progress(self, step: int | None) -> None:
        now = time.monotonic()
        if self._step is not None:
            self._slowest = max(self._slowest, now - self._at)
        self._step, self._at = step, now

    def enter(self, step: int, synchronize: Synchronize, *, newer: bool) -> None:
        def work(round_: AnnouncedRound) -> None:
            self._set_environment(round_)
            self.live_profile.moved()
            met_at = time.monotonic()
            how = synchronize(round_)
            self._round.synced(self.coordinator.step, met_at, how)

        formed = self._round.formed
        if not newer and formed is not None and not self.lost():
            with contextlib.suppress(PeerLost):
                work(formed.round)
                return
        self._round.in_newest(step, work)

    @staticmethod
    def _set_environment(round_: AnnouncedRound) -> None:
        os.environ.update(round_.environment)

    def _status(self) -> StepStatus:
        """Called in the thread that receives the rounds."""
        main = self._round.program.main
        waits = any(group.waits for group in self._round.groups)
        call = main.waits_in()
        if call is None and (inner := self.gradients.waits_in()) is not None:
            call = in_group(inner)
        return StepStatus(self._step, waits, self._slowest, call, main.recent())


_world: list[Fixed | Rounds] = []


def init(*comm: Any, **options: Any) -> None:
    """Join the world that the launcher describes; alone without one. Without effect after the first call."""
    if any(comm) or any(options.values()):
        raise LoopError("hvd.init(comm=…, process_sets=…): all ranks are in the one world; write hvd.init()")
    if _world:
        return
    socket = os.environ.get(env.AGENT_SOCKET)
    if socket and uses_elastic():
        _world.append(Rounds(Announcements(socket)))
    else:
        _world.append(Fixed())


def shutdown() -> None:
    """The script needs no further collective. The process group stays until the process ends, because others may still
    receive from it."""


def is_initialized() -> bool:
    """Whether `init` was called."""
    return bool(_world)


def current() -> Fixed | Rounds:
    """The world. Raises `LoopError` before `init`."""
    if not _world:
        raise LoopError("Horovod is not initialized: write hvd.init() before this line")
    return _world[0]


def _nothing() -> None: ...


def _put(name: str, data: bytes) -> str:
    """Write an object below the job's URL; where it is. The script may have no commits there."""
    store = RetryingStore(open_store(os.environ[env.CHECKPOINT_URL]))
    store.put(name, data)
    return f"{store.url.rstrip('/')}/{name}"


def _leave() -> None:
    if dist.is_initialized():
        leave_group()
