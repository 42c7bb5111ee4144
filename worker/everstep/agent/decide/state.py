"""The agent's state, and the basic operations on its slots that all decisions use. Pure.

Invariant: a process that is sent SIGKILL is marked, so that its end is not judged as a failure.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum, auto

from everstep.agent.decide.events import Instruction, Purpose, Signal, Timer
from everstep.membership.draining import Coming, Staying
from everstep.membership.world_state import Round


@dataclass(frozen=True, slots=True)
class Config:
    """`agent`: its id in the round. `alone`: nothing else restarts this job, so the agent tells the others of a final
    failure. `grace_seconds`: from SIGTERM until all processes must have ended."""

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

    `killed`: the agent ended it, so its end is no failure. `born`: the round for which it was forked; 0: it was forked
    to get ready for a later one. `earlier`: how many failures of the present round were charged before it was forked.
    Its own failure follows from none of these.
    """

    phase: SlotPhase = SlotPhase.EMPTY
    pid: int = 0
    speaks: bool = False
    ready: bool = False
    killed: bool = False
    born: int = 0
    entered: int = 0  # the newest round in which it waits or trains
    trains: int = 0  # the round in which it trains
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
    earlier: int = 0  # `Slot.earlier` of the failed process


@dataclass(frozen=True, slots=True)
class Notice:
    """The agent is asked to stop, and it is not decided yet whether the others go on.

    `count`: how many members are asked to stop, as the store last said; 0: it has not said yet. `last_count`: the count
    when the present wait for more requests to stop began. `others`: who could go on. `coming`: whether others may still
    come for the places. `waits`: nobody else was asked meanwhile, and this agent trains on until another one can take
    its place.
    """

    count: int = 0
    last_count: int = 0
    others: Staying = Staying.NOBODY
    coming: Coming = Coming.NEVER
    waits: bool = False


class Interrupt(Enum):
    """The state of a terminal's Ctrl-C (SIGINT)."""

    NONE = auto()  # there was none
    RECENT = auto()  # it came just now: another SIGINT is the same Ctrl-C, passed on by a wrapper
    ANSWERED = auto()  # another Ctrl-C kills all processes at once


@dataclass(frozen=True, slots=True)
class State:
    config: Config
    slots: tuple[Slot, ...]
    keeps: bool = False  # the job's processes speak with their agents
    announced: bool = False  # the document says so
    round: Round | None = None
    over: bool = True  # `round` has ended for this agent
    joining: bool = False
    trained: Round | None = None  # the last round that all processes were in
    done: bool = False
    finishing: bool = False  # a member of the round is done
    charges: int = 0  # made by this agent; used if the store does not give the job's count
    failures: int = 0  # charges by this agent for the present round, and for processes forked for the next one
    outside: int = 0  # kills from outside since all processes last trained from a later step than ever before
    reached: int = -1  # the latest step from which they trained
    stalls: tuple[int, int] = (0, 0)  # the step in which a process last hung, and how often in a row
    failure: Failure | None = None  # the last failure that was charged
    struck: int = -1  # the newest round in which a process of this agent was killed from outside
    suspect: Failure | None = None  # perhaps another agent's fault; the next round shows whose
    notice: Notice | None = None
    interrupt: Interrupt = Interrupt.NONE
    ending: Ending | None = None
    finished: bool = False


Step = tuple[State, tuple[Instruction, ...]]


def begin(config: Config) -> State:
    return State(config, (Slot(),) * config.processes)


def started(state: State, slot: int, pid: int) -> State:
    """Record the pid of a process that was forked for a slot."""
    return with_slots(state, (slot,), replace(state.slots[slot], pid=pid))


def all_ready(state: State) -> bool:
    return all(slot.phase is SlotPhase.RUNNING and slot.ready and not slot.killed for slot in state.slots)


def end(state: State, ending: Ending, number: int) -> Step:
    """Begin to end the agent. Only the first reason is kept."""
    live = tuple(i for i in which(state, SlotPhase.RUNNING) if not state.slots[i].killed)
    state = state if state.ending is not None else replace(state, ending=ending)
    state, instructions = kill(state, live, number)
    if number == signal.SIGKILL or not live:
        return state, instructions
    return state, (*instructions, Timer(state.config.shutdown_seconds, Purpose.GRACE))


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
