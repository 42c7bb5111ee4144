"""What an agent knows, and the moves on its processes that everything it decides is made of. Pure.

Invariant: a process that is sent SIGKILL is marked, so that its end is not taken for news.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum, auto

from everstep.agent.decide.events import Instruction, Purpose, Signal, Timer
from everstep.membership.world_state import Round


@dataclass(frozen=True, slots=True)
class Config:
    """`agent`: its name in the round. `alone`: nobody else restarts this job, so a failure for good is told to the
    other agents. `grace_seconds`: from SIGTERM to when all processes have to be gone."""

    agent: str
    processes: int
    max_restarts: int = 0
    alone: bool = True
    recovery_seconds: float = 300.0
    shutdown_seconds: float = 30.0
    grace_seconds: float = 30.0


class SlotPhase(Enum):
    EMPTY = auto()
    RUNNING = auto()
    SUCCEEDED = auto()


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one local rank.

    `killed`: we ended it, so its end means nothing. `born`: the round that it was forked in; 0: it is to get ready.
    `earlier`: failures in the present round that were charged before it was forked; it follows from none of them.
    """

    phase: SlotPhase = SlotPhase.EMPTY
    pid: int = 0
    speaks: bool = False
    ready: bool = False
    killed: bool = False
    born: int = 0
    comes: int = 0  # the newest round that it waits in, or is in
    trains: int = 0  # the round that it is in
    earlier: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """The agent ends with this code when its processes have."""

    code: int
    why: str


@dataclass(frozen=True, slots=True)
class Failure:
    round: int
    code: int
    why: str
    earlier: int = 0  # as of the process that failed


@dataclass(frozen=True, slots=True)
class Notice:
    """The agent is asked to stop, and it is not decided yet whether the others go on.

    `count`: members that are asked to stop, as the store said last; 0: it has not. `heard`: what it was when the time
    began in which others might be asked, too.
    """

    count: int = 0
    heard: int = 0


class Interrupt(Enum):
    """What became of a terminal's Ctrl-C (SIGINT)."""

    NONE = auto()  # there was none
    HEARD = auto()  # just now: another is the same one, which a wrapper has passed on
    ANSWERED = auto()  # another means: at once


@dataclass(frozen=True, slots=True)
class State:
    config: Config
    slots: tuple[Slot, ...]
    keeps: bool = False  # the job's processes speak
    told: bool = False  # that they do
    round: Round | None = None
    over: bool = True  # `round` is not to be trained in any more
    joining: bool = False
    trained: Round | None = None  # the last round that all processes were in
    done: bool = False
    finishing: bool = False  # a member of the round is done
    charges: int = 0  # made by this agent, if the store does not say
    failures: int = 0  # charges made by this agent for the present round, and for what was forked to leave it behind
    outside: int = 0  # ends from outside, since all processes trained from a later step than ever before
    reached: int = -1  # the latest step from which they did
    stalls: tuple[int, int] = (0, 0)  # the step in which a process hung last, and how often in a row
    failure: Failure | None = None  # the last one that was charged
    struck: int = -1  # the newest round in which a process of this agent was ended from outside
    suspect: Failure | None = None  # perhaps somebody else's, which shows when the next round is formed
    notice: Notice | None = None
    interrupt: Interrupt = Interrupt.NONE
    ending: Ending | None = None
    finished: bool = False


Step = tuple[State, tuple[Instruction, ...]]


def begin(config: Config) -> State:
    return State(config, (Slot(),) * config.processes)


def started(state: State, slot: int, pid: int) -> State:
    """A process that was to be forked has this pid."""
    return with_slots(state, (slot,), replace(state.slots[slot], pid=pid))


def all_ready(state: State) -> bool:
    return all(slot.phase is SlotPhase.RUNNING and slot.ready and not slot.killed for slot in state.slots)


def end(state: State, ending: Ending, number: int) -> Step:
    """The first reason to end is the one that is told."""
    live = tuple(i for i in which(state, SlotPhase.RUNNING) if not state.slots[i].killed)
    state = state if state.ending is not None else replace(state, ending=ending)
    state, told = kill(state, live, number)
    if number == signal.SIGKILL or not live:
        return state, told
    return state, (*told, Timer(state.config.shutdown_seconds, Purpose.GRACE))


def kill(state: State, slots: tuple[int, ...], number: int) -> Step:
    slots = tuple(i for i in slots if not state.slots[i].killed)
    if not slots:
        return state, ()
    for i in slots:
        state = with_slots(state, (i,), replace(state.slots[i], killed=number == signal.SIGKILL))
    return state, (Signal(slots, number),)


def which(state: State, phase: SlotPhase) -> tuple[int, ...]:
    return tuple(i for i, slot in enumerate(state.slots) if slot.phase is phase)


def with_slots(state: State, slots: tuple[int, ...], slot: Slot) -> State:
    return replace(state, slots=tuple(slot if i in slots else old for i, old in enumerate(state.slots)))
