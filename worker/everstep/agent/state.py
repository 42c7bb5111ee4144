"""What an agent does next. Pure: no clock, no chance, no I/O.

`decide(state, event)` gives the state after the event and what is to be done about it. Two kinds of processes are told
apart. Those that *speak* (they use the session) keep their memory from round to round: they are told of a new round,
and only a dead one is replaced, while the others train on. All others are killed when their round is over and forked
anew in the next: they would wait in a collective for ever.

Invariants: a process is forked for a round only when no process of an older one is left in its slot; a round that
stands is never left for another's sake by a done agent; each failure is charged at most once; after `Finish` nothing.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import assert_never

from everstep.agent.events import (
    Announce,
    Asked,
    Began,
    Break,
    Changed,
    Charge,
    Charged,
    CloseJob,
    Done,
    Elapsed,
    Event,
    Exited,
    Fault,
    Finish,
    Fork,
    Formed,
    Hello,
    Hung,
    Hurt,
    Instruction,
    Join,
    KeepProcesses,
    NotFormed,
    Purpose,
    Ready,
    Signal,
    StepOut,
    Timer,
    Trains,
)
from everstep.contract import exit_codes
from everstep.contract.document import Setback
from everstep.rendezvous.participant import Broken, Closed, Finishing, Growing, Round, Whole

SETTLE_SECONDS = 1.0  # in which the one whose fault it was is known to all
HURT_SECONDS = 1.0  # in which a round is over, if a member of it died
LINGER_SECONDS = 300.0  # for which a done agent waits for the others, as torchrun does
MOST_OUTSIDE = 20  # ends of processes from outside, one after the other; then they count as the program's fault
FINAL = (exit_codes.FENCED, exit_codes.STORE_UNUSABLE, exit_codes.PREEMPTED)


@dataclass(frozen=True, slots=True)
class Config:
    """`alone`: nobody else restarts this job, so a failure for good is told to the other agents."""

    processes: int
    max_restarts: int = 0
    alone: bool = True
    recovery_seconds: float = 300.0
    shutdown_seconds: float = 30.0


class Life(Enum):
    EMPTY = auto()
    LIVE = auto()
    SUCCEEDED = auto()


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one local rank.

    `killed`: we ended it, so its end means nothing. `born`: the round that it was forked in; 0: it is to get ready.
    """

    life: Life = Life.EMPTY
    pid: int = 0
    speaks: bool = False
    ready: bool = False
    killed: bool = False
    born: int = 0
    trains: int = 0  # the round that it is in


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
    outside: int = 0  # ends from outside, since all processes trained
    failure: Failure | None = None  # the last one that was charged
    ending: Ending | None = None
    finished: bool = False


def begin(config: Config) -> State:
    return State(config, (Slot(),) * config.processes)


def decide(state: State, event: Event) -> tuple[State, tuple[Instruction, ...]]:
    """Total: every event has an answer in every state."""
    if state.finished:
        return state, ()
    state, first = _take(state, event)
    state, then = _advance(state)
    return state, (*first, *then)


Step = tuple[State, tuple[Instruction, ...]]


def _take(state: State, event: Event) -> Step:
    """What the event itself changes."""
    match event:
        case Began(keeps):
            return replace(state, keeps=keeps, told=keeps), ()
        case Formed():
            return _formed(state, event)
        case NotFormed(why, finished):
            code = exit_codes.OK if finished else 1
            return _end(replace(state, joining=False), Ending(code, why), signal.SIGKILL)
        case Changed():
            return _changed(state, event)
        case Exited():
            return _exited(state, event)
        case Hello() | Ready() | Trains() | Hurt() | Hung():
            slot = state.slots[event.slot]
            known = slot.life is Life.LIVE and slot.pid == event.pid and not slot.killed
            return _heard(state, event) if known else (state, ())
        case Charged(restarts):
            return _charged(state, restarts)
        case Asked(number):
            return _end(state, Ending(128 + number, f"asked to stop by {signal.Signals(number).name}"), number)
        case Elapsed(timer):
            return _elapsed(state, timer)
        case _:
            assert_never(event)


# --- rounds


def _formed(state: State, event: Formed) -> Step:
    keeps = state.keeps or event.keeps
    state = replace(state, round=event.round, over=False, joining=False, done=False, finishing=False, keeps=keeps)
    # Who had finished in the last round must repeat what the others lost.
    state = _with(state, _which(state, Life.SUCCEEDED), Slot())
    everyone = tuple(range(len(state.slots)))
    if state.ending is not None or not keeps or not _all_ready(state):
        return state, ()
    whole = _is_whole(state, event.round, event.history)
    announce = Announce(everyone, event.round, whole)
    if whole:
        return state, (announce,)
    return state, (announce, Timer(state.config.recovery_seconds, Purpose.COME, event.round.number))


def _is_whole(state: State, new: Round, history: tuple[Setback, ...]) -> bool:
    """Whether the members of the round that our processes train in still work together, and go on together."""
    old = state.trained
    if old is None or any(slot.trains != old.number for slot in state.slots):
        return False
    if any(setback.round >= old.number for setback in history):
        return False
    here = {member.agent for member in new.members}
    return all(member.agent in here for member in old.members)


def _changed(state: State, event: Changed) -> Step:
    if state.round is None or event.round != state.round.number or state.joining:
        return state, ()
    match event.standing:
        case Whole():
            return state, ()
        case Broken():
            return replace(state, over=True), ()
        case Finishing():
            return replace(state, finishing=True), ()
        case Growing():
            return (state if state.done else replace(state, over=True)), ()
        case Closed(why):
            if state.done:
                return _end(state, Ending(exit_codes.OK, why), signal.SIGTERM)
            return _end(state, Ending(1, f"the job was closed: {why}"), signal.SIGKILL)
        case _:
            assert_never(event.standing)


# --- processes


def _exited(state: State, event: Exited) -> Step:
    slot = state.slots[event.slot]
    if slot.pid != event.pid or slot.life is not Life.LIVE:
        return state, ()
    succeeded = event.code == exit_codes.OK and not slot.killed
    after = replace(slot, life=Life.SUCCEEDED) if succeeded else Slot(pid=event.pid)
    state = _with(state, (event.slot,), after)
    if state.ending is not None:
        if event.code == exit_codes.PREEMPTED and state.ending.code > 128:
            state = replace(state, ending=replace(state.ending, code=exit_codes.PREEMPTED))
        return state, ()
    if succeeded or slot.killed:
        return state, ()
    if event.code in FINAL:
        return _end(state, Ending(event.code, event.why), signal.SIGTERM)
    number = state.round.number if state.round is not None else 0
    return _failed(state, Failure(number, event.code, event.why), event.fault)


def _failed(state: State, failure: Failure, fault: Fault) -> Step:
    told: list[Instruction] = []
    if state.round is not None and not state.over and not state.joining:
        # Where processes keep their memory the others go on without us; else all begin again together.
        leave = StepOut if state.keeps else Break
        told.append(leave(state.round.number, failure.why))
    state = replace(state, over=True)
    if fault is Fault.OUTSIDE:
        state = replace(state, outside=state.outside + 1)
        if state.outside > MOST_OUTSIDE:
            fault = Fault.PROGRAM
    match fault:
        case Fault.PROGRAM:
            told.append(Charge(failure.round, failure.why))
            state = replace(state, failure=failure, charges=state.charges + 1)
        case Fault.PEER:
            told.append(Timer(SETTLE_SECONDS, Purpose.SETTLE, failure.round, failure.why))
            state = replace(state, failure=failure)
        case Fault.OUTSIDE:
            pass
        case _:
            assert_never(fault)
    return state, tuple(told)


def _charged(state: State, restarts: int | None) -> Step:
    count = state.charges if restarts is None else restarts
    if count <= state.config.max_restarts or state.failure is None:
        return state, ()
    failure = state.failure
    code = failure.code if failure.code > 0 else 128 - failure.code
    why = f"{failure.why}; {state.config.max_restarts} restarts are allowed"
    state, told = _end(state, Ending(code, why), signal.SIGKILL)
    return state, ((CloseJob(why), *told) if state.config.alone else told)


def _heard(state: State, event: Hello | Ready | Trains | Hurt | Hung) -> Step:
    slot = state.slots[event.slot]
    match event:
        case Hello():
            state = _with(state, (event.slot,), replace(slot, speaks=True))
            everyone = all(s.life is Life.LIVE and s.speaks for s in state.slots)
            state = replace(state, keeps=state.keeps or everyone)
            if state.round is None or state.over or state.joining or state.ending is not None:
                return state, ()
            return state, (Announce((event.slot,), state.round, False),)
        case Ready():
            return _with(state, (event.slot,), replace(slot, ready=True)), ()
        case Trains(round=number):
            state = _with(state, (event.slot,), replace(slot, trains=number))
            everyone = all(s.trains == number for s in state.slots)
            if everyone and state.round is not None and state.round.number == number:
                state = replace(state, trained=state.round, outside=0)
            return state, ()
        case Hurt(round=number, why=why):
            if state.round is None or number != state.round.number or state.over:
                return state, ()
            return state, (Timer(HURT_SECONDS, Purpose.HURT, number, why),)
        case Hung(why=why):
            if state.ending is not None:
                return state, ()
            state, told = _kill(state, (event.slot,), signal.SIGKILL)
            number = state.round.number if state.round is not None else 0
            state, then = _failed(state, Failure(number, -signal.SIGKILL, why), Fault.OUTSIDE)
            return state, (*told, *then)
        case _:
            assert_never(event)


# --- time


def _elapsed(state: State, timer: Timer) -> Step:
    number = state.round.number if state.round is not None else 0
    stands = state.round is not None and not state.over and not state.joining
    match timer.purpose:
        case Purpose.SETTLE:
            if state.ending is not None:
                return state, ()
            state = replace(state, charges=state.charges + 1)
            return state, (Charge(timer.round, timer.why, unless_others=True),)
        case Purpose.HURT:
            if not stands or timer.round != number or state.ending is not None:
                return state, ()
            return replace(state, over=True), (Break(number, timer.why),)
        case Purpose.COME:
            late = tuple(
                i for i in _which(state, Life.LIVE) if state.slots[i].trains < timer.round and not state.slots[i].killed
            )
            if timer.round != number or not late or not stands or state.ending is not None:
                return state, ()
            return _kill(state, late, signal.SIGKILL)
        case Purpose.GRACE:
            return _kill(state, _which(state, Life.LIVE), signal.SIGKILL)
        case Purpose.LINGER:
            if not state.done or timer.round != number or not stands:
                return state, ()
            return _end(state, Ending(exit_codes.OK, "the others take longer"), signal.SIGTERM)
        case _:
            assert_never(timer.purpose)


# --- what follows from the state


def _advance(state: State) -> Step:
    live = _which(state, Life.LIVE)
    if state.ending is not None:
        if live:
            return state, ()
        return replace(state, finished=True), (Finish(state.ending.code, state.ending.why),)
    if state.joining:
        missing = _which(state, Life.EMPTY)
        return _fork(state, missing, None) if missing and state.keeps else (state, ())
    if state.round is None or state.over:
        return _between(state, live)
    return _in_round(state, state.round, live)


def _in_round(state: State, current: Round, live: tuple[int, ...]) -> Step:
    number = current.number
    if all(slot.life is Life.SUCCEEDED for slot in state.slots):
        if state.done:
            return state, ()
        return replace(state, done=True), (Done(number), Timer(LINGER_SECONDS, Purpose.LINGER, number))
    if state.keeps and state.finishing and all(slot.trains < number for slot in state.slots) and not state.done:
        # A round forms in all processes or in none: the others had finished when they took us in.
        if live:
            return _kill(state, live, signal.SIGKILL)
        return replace(state, done=True), (Done(number),)
    if not state.keeps:
        if not live:
            return _fork(state, tuple(range(len(state.slots))), current)
        return _kill(state, live, signal.SIGKILL) if _which(state, Life.EMPTY) else (state, ())
    if not all(_in_place(slot, number) for slot in state.slots):
        state, then = _advance(replace(state, over=True))
        return state, (StepOut(number, "a process ended"), *then)
    if not state.told and _all_ready(state):
        return replace(state, told=True), (KeepProcesses(number),)
    return state, ()


def _in_place(slot: Slot, number: int) -> bool:
    if slot.life is Life.LIVE:
        return not slot.killed and (slot.ready or slot.born == number)
    return slot.life is Life.SUCCEEDED


def _between(state: State, live: tuple[int, ...]) -> Step:
    """No round stands: get processes into the state in which a round can be asked for, then ask."""
    after = state.round.number if state.round is not None else 0
    if not state.keeps:
        state, told = _kill(state, live, signal.SIGKILL)
        return replace(state, joining=True), (*told, Join(after))
    if live and _which(state, Life.SUCCEEDED):
        return _kill(state, live, signal.SIGKILL)
    missing = tuple(i for i, slot in enumerate(state.slots) if slot.life is not Life.LIVE)
    if missing:
        return _fork(state, missing, None)
    if _all_ready(state):
        return replace(state, joining=True), (Join(after),)
    return state, ()


def _fork(state: State, slots: tuple[int, ...], current: Round | None) -> Step:
    """Who carries it out says with `started` which processes they are."""
    born = current.number if current is not None else 0
    return _with(state, slots, Slot(Life.LIVE, born=born)), (Fork(slots, current),)


def started(state: State, slot: int, pid: int) -> State:
    """A process that was to be forked has this pid."""
    return _with(state, (slot,), replace(state.slots[slot], pid=pid))


def _all_ready(state: State) -> bool:
    return all(slot.life is Life.LIVE and slot.ready and not slot.killed for slot in state.slots)


def _end(state: State, ending: Ending, number: int) -> Step:
    """The first reason to end is the one that is told."""
    live = tuple(i for i in _which(state, Life.LIVE) if not state.slots[i].killed)
    state = state if state.ending is not None else replace(state, ending=ending)
    state, told = _kill(state, live, number)
    if number == signal.SIGKILL or not live:
        return state, told
    return state, (*told, Timer(state.config.shutdown_seconds, Purpose.GRACE))


def _kill(state: State, slots: tuple[int, ...], number: int) -> Step:
    slots = tuple(i for i in slots if not state.slots[i].killed)
    if not slots:
        return state, ()
    for i in slots:
        state = _with(state, (i,), replace(state.slots[i], killed=number == signal.SIGKILL))
    return state, (Signal(slots, number),)


def _which(state: State, life: Life) -> tuple[int, ...]:
    return tuple(i for i, slot in enumerate(state.slots) if slot.life is life)


def _with(state: State, slots: tuple[int, ...], slot: Slot) -> State:
    return replace(state, slots=tuple(slot if i in slots else old for i, old in enumerate(state.slots)))
