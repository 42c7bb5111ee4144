"""Tracks where in its loop the script is, and refuses calls on its process groups that are wrong there.

Before the first round, a process builds its objects alone. A call that reads the world then gets an answer that looks
right and is wrong (rank 0 of 1, sums of one). Between two steps, a collective whose peer was lost would not be
repeated. Both are refused at the script's call, on every rank, because every rank runs the same script.

Invariant: in a step, the check reads one attribute only.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from types import FrameType

from everstep.contract.library_files import is_library
from everstep.contract.refusal import OWN_MODULES
from everstep.recovery.errors import LoopError

# The modules with torch's functions for a script's own collectives. DDP and FSDP use their groups in other ways.
_OWN = (
    "torch.distributed.distributed_c10d",
    "torch.distributed.nn.functional",
    "torch.distributed._functional_collectives",
)
# Our modules whose frames are skipped in search of the script's call. A call by another module of ours is our own.
_BETWEEN = ("everstep.recovery.", "everstep.torch_private.", "everstep.train.guards.comparison.")
_OF_STATE = "everstep.recovery.state."


class ScriptPhase(Enum):
    BUILDING = auto()  # alone, before the first round
    STEP = auto()  # in a step or an evaluation, which is repeated if a peer is lost
    BODY = auto()  # in a step, in the body of the script's own loop, whose errors the session cannot catch
    BETWEEN = auto()
    OVER = auto()  # after the last step


class ScriptLocation:
    """The script's phase, shared by the groups of one program. Without `others`, the world has one process for ever,
    and nothing is refused."""

    def __init__(self) -> None:
        self.where = ScriptPhase.BUILDING
        self.others = True
        self.entered = 0  # steps and evaluations, including repeated ones
        self.refused: LoopError | None = None  # of the newest collective in the loop; kept, as a script may catch it
        self.left: Callable[[], None] | None = None  # the script has left its loop: this ends the run there
        self._thread = threading.get_ident()

    @property
    def free(self) -> bool:
        """Whether this thread may run collectives without a further check."""
        return self.where is ScriptPhase.STEP and threading.get_ident() == self._thread

    def enter(self, where: ScriptPhase) -> None:
        self.where = where
        self.entered += where is ScriptPhase.STEP

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context for code that is called again if a peer is lost."""
        self.enter(ScriptPhase.STEP)
        try:
            yield
        finally:
            self.enter(ScriptPhase.BETWEEN)

    def collective(self, name: str) -> str:
        """Check a collective that begins when `free` is false. Raises `LoopError` if it is wrong there. Behind a loop
        that was left it ends the run, as it would be over behind one that came to its end.

        Returns what to write if it loses a peer, or "". Behind the loop the cause may be that one rank calls it."""
        try:
            self._check(name)
        except LoopError as e:
            if self.where is ScriptPhase.BETWEEN:
                self.refused = e
            raise
        if self.where is not ScriptPhase.OVER or (site := script_call_site(sys._getframe(1))) is None:
            return ""
        return BEHIND_LOOP.format(name=site.function if site.own else name, at=site.at)

    def waits(self, begun: int, name: str) -> None:
        """Check a wait for a collective that began when `begun` steps were entered. Raises `LoopError` unless that is
        the present step: if a peer were lost in between, the collective would not be repeated."""
        if begun == self.entered or not self.others:
            return
        site = script_call_site(sys._getframe(2))
        raise LoopError(
            f"{name} was begun in an earlier step and is waited for in this one"
            f"{site.at if site is not None else ''}: it cannot be repeated if a peer is lost in between. Wait for "
            "it in its own step, before the step's block ends"
        )

    def _check(self, name: str) -> None:
        if not self.others or self.where is ScriptPhase.OVER:
            return
        if self.where in (ScriptPhase.STEP, ScriptPhase.BODY) and isinstance(
            threading.current_thread(), threading._DummyThread
        ):
            return  # a thread of autograd
        site = script_call_site(sys._getframe(2))
        if site is None:
            return
        name = site.function if site.own else name
        match self.where:
            case ScriptPhase.STEP:
                raise LoopError(
                    f"{name}{site.at} is in the thread {threading.current_thread().name!r}: ranks may run it "
                    "before or after the step's own collectives, and it is not repeated when a peer is lost. Call it "
                    "in the thread of the loop, inside `with step:`"
                )
            case ScriptPhase.BUILDING if site.own:
                raise LoopError(
                    f"{name}{site.at}: before the loop this process is alone, and no other rank would be in it. To do "
                    "something in one process of the job, write run.once(fn); to prepare files on each machine, "
                    "run.once(fn, each='machine'); to evaluate, run.evaluate(fn, every=N). What all ranks must agree "
                    "on belongs inside `with step:`"
                )
            case ScriptPhase.BODY if site.own:
                raise LoopError(
                    f"{name}{site.at} is in the body of the loop over the prepared loader. If a peer is lost in it, "
                    "the body ends with an error that Everstep cannot catch there. Write `with "
                    "accelerator.accumulate(model):` around the body of the loop"
                )
            case ScriptPhase.BETWEEN if self.left is not None:
                end, self.left = self.left, None
                end()
            case ScriptPhase.BETWEEN:
                raise LoopError(
                    f"{name}{site.at} is between two steps, where it is not repeated when a peer is lost. Move it "
                    "into `with step:`; for an evaluation write before the loop `run.evaluate(fn, every=N)`: fn is "
                    "called after each N-th step, and again if a peer is lost in it. A forward pass that is each "
                    "rank's own takes `model.module`, which is inside DistributedDataParallel"
                )
            case _:
                return

    def check_known(self, name: str) -> None:
        """Check a read of a group's rank or size (`name`). Raises `LoopError` if the script reads it before it is
        known."""
        if self.where is not ScriptPhase.BUILDING or not self.others:
            return
        site = script_call_site(sys._getframe(1))
        if site is None or site.library:
            return
        if site.function in ("get_rank", "get_world_size"):
            raise LoopError(f"dist.{site.function}(){site.at}: {UNKNOWN}")
        if not site.function:  # the group's own method; torch, as DDP does, may ask what the world is for now
            raise LoopError(f"group.{name}(){site.at}: {UNKNOWN}")

    def unknown(self, what: str) -> None:
        """Check a call `what` by which the script reads the ranks. Raises `LoopError` while they are not known."""
        if self.where is not ScriptPhase.BUILDING or not self.others:
            return
        site = script_call_site(sys._getframe(1))
        if site is not None and not site.function and not site.library:  # torch itself does not ask
            raise LoopError(f"{what}{site.at}: {UNKNOWN}")


BEHIND_LOOP = (
    "{name}{at} is behind the loop, and a rank that it needs is gone. If only some ranks call it (`if run.rank == "
    "0:`), let all of them; a forward pass of one rank takes `model.module`, which is inside DistributedDataParallel"
)
UNKNOWN = (
    "before the loop a process has no rank yet, and the number of ranks is not known: a process that comes later "
    "builds its objects alone, while the others train, and ranks change when a peer is lost. Ask run.rank and "
    "run.world_size inside the loop. To prepare files, write run.once(fn, each='machine'); to do something in one "
    "process of the job, run.once(fn)"
)
NO_PIPELINE = (
    "torch's stages exchange their shapes once, in their first step, and a process that comes later would get no "
    "answer. Have the stage and its schedule made anew in each round: write `run.mesh(model=N)`, and behind it "
    "`schedule = run.pipeline(make)`, where make() returns the schedule, and `schedule.step(…)` in the step"
)
NO_SUBGROUPS = (
    "a group of some ranks can follow a world whose ranks change when a peer is lost, if it says what a replica is. "
    "Write `run.mesh(model=N)` before it, if N neighbours in rank compute one model together: then the group has "
    "ranks of one replica, and is made for each of them, or the same rank of all replicas. For parallelize_module() "
    'write `run.mesh(tensor=N)`, with the groups `mesh.get_group("tensor")` and `mesh.get_group("replicate")`; for '
    "FSDP2 `run.mesh(shard=N)`; dist.new_group() is a group of all ranks"
)


@dataclass(frozen=True, slots=True)
class CallSite:
    """The script's present line, and the torch function that it calls. `own`: scripts run collectives by this function;
    otherwise it belongs to a module such as DDP. `library`: the line is in an installed package."""

    function: str
    own: bool
    library: bool
    at: str  # " (train.py:31)"


def script_call_site(frame: FrameType | None) -> CallSite | None:
    """The line of the script that made a call, searched upwards from `frame`; None if our own code made it."""
    entry: FrameType | None = None
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == "torch" or module.startswith("torch."):
            if module != "torch.distributed.c10d_logger":
                entry = frame
            elif frame.f_code.co_name == "_get_msg_dict":
                return None  # torch words an error that the script hears of in any case
        elif not module.startswith(_BETWEEN) or module.startswith(_OF_STATE):
            return None if module.startswith(OWN_MODULES) else _call_site(frame, entry)
        frame = frame.f_back
    return None


def _call_site(frame: FrameType, entry: FrameType | None) -> CallSite:
    function, module = "", ""
    if entry is not None:
        function, module = entry.f_code.co_name, str(entry.f_globals.get("__name__", ""))
    file = frame.f_code.co_filename
    return CallSite(
        function, module.startswith(_OWN), is_library(file), f" ({file.rpartition('/')[2]}:{frame.f_lineno})"
    )
