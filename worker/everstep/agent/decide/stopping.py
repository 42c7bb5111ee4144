"""Decides what an agent does that is asked to stop while the others could train on. Pure.

    asked: the others are told, training goes on -+-> as many go on: it leaves, at the end of a step if it can
                                                  +-> fewer go on: it trains on until another agent can take its
                                                  |   place, if the job has a publisher, and leaves
                                                  +-> nobody stays: it trains on if the publisher announces others
                                                  +-> too few stay: all save together and stop

If a job is suspended, all its agents are asked to stop, within about a second. So it is not known at once how many
stay. Waiting for that costs nothing, because all train meanwhile. Nor does it cost anything to wait for a replacement
(ADR 0063); but the time is that of the save, if none comes, so it is a third of the grace period. If all are asked,
that is a suspension or the drain of the only node: the document says which, because who publishes the job announces
in it how many it creates for their places. Processes that speak with their agent are told to leave, and the other
agents' processes go on. Processes that do not speak are sent the signal, which a script may handle.

Processes that speak answer a terminal's Ctrl-C as SIGTERM: they save. All others are sent SIGINT, as by torchrun, and
have a few seconds to end. A second Ctrl-C kills all at once.

Invariants: no failure is charged for an agent that leaves. An agent that was asked to stop ends within its grace
period. It does not leave a round before one that stays has the training state. If the store does not answer, the agent
stops as if it were alone, because a saved state loses nothing.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import assert_never

from everstep.agent.decide.events import Drained, Instruction, Purpose, StopRequested, Timer
from everstep.agent.decide.state import Ending, Interrupt, Notice, SlotPhase, State, Step, all_ready, end, kill, which
from everstep.contract import exit_codes
from everstep.contract.document import LEFT
from everstep.membership.commands import Done, Drain, Stop, Withdraw
from everstep.membership.draining import Coming, Staying
from everstep.membership.world_state import Stopping

QUIET_SECONDS = 1.0  # without another agent that is asked to stop; at most a tenth of the grace period
NOTICE_SHARE = 1 / 3  # of the grace period; by then it must be known who stays, and who has a replacement
QUIET_SHARE = 1 / 10
INTERRUPT_SECONDS = 5.0  # from Ctrl-C until processes that do not speak are killed
SAME_SECONDS = 0.5  # one Ctrl-C may come twice in this time: from the terminal, and passed on by a wrapper
GONE = Ending(exit_codes.PREEMPTED, "asked to stop: the others go on")


def requested(state: State, event: StopRequested) -> Step:
    """A signal asks the agent to stop."""
    if event.signal == signal.SIGINT:
        return _interrupted(state, event)
    if event.signal == signal.SIGTERM:
        return _leave_or_stop(state, event.enough)
    return end(state, _stop(event.signal), event.signal)


def advice(state: State, number: int) -> str:
    """A message for the person who sent the signal; computed before the signal is handled."""
    name = signal.Signals(number).name
    if number != signal.SIGINT:
        return f"asked to stop by {name}"
    match state.interrupt:
        case Interrupt.NONE if state.keeps:
            return (
                f"asked to stop by {name}: the processes finish their step, save and stop. Press Ctrl-C again to kill "
                "them at once, without saving"
            )
        case Interrupt.NONE:
            seconds = min(INTERRUPT_SECONDS, state.config.shutdown_seconds)
            return (
                f"asked to stop by {name}, which is passed on; processes that are there in {seconds:g} s are killed. "
                "Press Ctrl-C again to kill them at once"
            )
        case Interrupt.RECENT:
            return ""
        case Interrupt.ANSWERED:
            return f"asked to stop by {name} again: all processes are killed"
        case _:
            assert_never(state.interrupt)


def hears_again(state: State) -> State:
    """From now on, another SIGINT counts as a second Ctrl-C."""
    return replace(state, interrupt=Interrupt.ANSWERED)


def _interrupted(state: State, event: StopRequested) -> Step:
    if state.interrupt is Interrupt.RECENT:
        return state, ()
    if state.interrupt is Interrupt.ANSWERED:
        return end(state, _stop(signal.SIGINT), signal.SIGKILL)
    state = replace(state, interrupt=Interrupt.RECENT)
    again = Timer(SAME_SECONDS, Purpose.AGAIN)
    if not state.keeps:
        seconds = min(INTERRUPT_SECONDS, state.config.shutdown_seconds)
        state, instructions = end(state, _stop(signal.SIGINT), signal.SIGINT)
        return state, (again, *instructions, Timer(seconds, Purpose.GRACE))
    state, instructions = _leave_or_stop(state, event.enough)
    return state, (again, *instructions)


def _leave_or_stop(state: State, enough: bool) -> Step:
    if state.ending is not None or not (enough and _is_in_place(state)):
        return _stop_all(state)
    if state.notice is not None:  # asked again: there may be less time than the grace period
        if state.notice.count == 0:
            return state, ()
        return _go(state) if state.notice.others.suffices else _stop_all(state)
    grace = state.config.grace_seconds
    return replace(state, notice=Notice()), (
        Stop(state.config.agent),
        Timer(grace * NOTICE_SHARE, Purpose.NOTICE),
        Timer(grace, Purpose.GRACE),
    )


def counted(state: State, world_state: Stopping) -> Step:
    """The store says how many members are asked to stop by now."""
    if state.notice is None or state.ending is not None:
        return state, ()
    before, others = state.notice, world_state.others
    coming = world_state.coming if state.keeps else Coming.NEVER
    if not others.suffices and coming is Coming.NEVER:
        return _stop_all(state)
    notice = replace(before, count=world_state.count, others=others, coming=coming)
    state = replace(state, notice=notice)
    if before.count == 0 or (before.waits and before.count != notice.count):
        return _listen(state)
    return _decide(state) if notice.waits else (state, ())


def is_quiet(state: State) -> Step:
    """The wait for others that may be asked to stop is over."""
    if state.notice is None or state.ending is not None:
        return state, ()
    if state.round is None or state.over or state.joining:
        return _uncounted(state), ()  # the next round gives a new count
    if state.notice.count != state.notice.last_count or not _state_stays(state, state.notice.count):
        return _listen(state)
    return _decide(replace(state, notice=replace(state.notice, waits=True)))


def _decide(state: State) -> Step:
    """It is known who is asked to stop: leave, stop, or train on until others come."""
    assert state.notice is not None
    match state.notice.others, state.notice.coming:
        case (Staying.ALL, _) | (Staying.ENOUGH, Coming.NEVER):
            return _go(state)
        case Staying.NOBODY, Coming.UNKNOWN:
            return _stop_all(state)
        case _:
            return state, ()


def is_late(state: State) -> Step:
    """The time has passed by which it must be known who stays."""
    if state.notice is None or state.ending is not None:
        return state, ()
    if state.notice.waits and state.notice.others is Staying.ENOUGH:
        state, instructions = _go(state)
        return state, (*instructions, Timer(state.config.grace_seconds * NOTICE_SHARE, Purpose.NOTICE))
    return _stop_all(state)


def left(state: State) -> Step:
    """This agent has left the round, and the others go on."""
    if state.ending is not None:
        return state, ()
    live = which(state, SlotPhase.RUNNING)
    # A process that is not ready yet has nothing to finish, and would receive the message late.
    speaking = tuple(i for i in live if state.slots[i].speaks and state.slots[i].ready)
    instructions: tuple[Instruction, ...] = (Drained(speaking),) if speaking else ()
    if state.notice is None:  # otherwise the grace period already runs since the signal
        instructions = (*instructions, Timer(state.config.grace_seconds, Purpose.GRACE))
    state = replace(state, over=True, ending=GONE)
    state, more = kill(state, tuple(i for i in live if i not in speaking), signal.SIGTERM)
    return state, (*instructions, *more)


def advance(state: State) -> Step:
    """The instructions of an agent that was asked to stop and has not decided yet."""
    if all(slot.phase is SlotPhase.SUCCEEDED for slot in state.slots):
        if not state.keeps:  # they may have heard the signal, too, as under a supervisor that sends it to all
            return end(state, _stop(_asked_by(state)), signal.SIGTERM)
        before = state
        state, instructions = end(state, Ending(exit_codes.OK, "its processes have succeeded"), signal.SIGTERM)
        if before.round is None or before.over or before.joining or before.done:
            return state, instructions
        return state, (Done(state.config.agent, before.round.number), *instructions)
    if which(state, SlotPhase.EMPTY):
        return end(state, _stop(_asked_by(state)), signal.SIGKILL)
    if state.keeps or not state.over or state.joining or state.round is None:
        return state, ()
    # Processes that do not speak end with their round, and no new ones are started.
    withdrawal = Withdraw(state.config.agent, state.round.number, LEFT)
    state, instructions = _stop_all(state)
    return state, (withdrawal, *instructions)


def _go(state: State) -> Step:
    if state.keeps and state.round is not None:
        return _uncounted(state), (Drain(state.config.agent, state.round.number),)
    return end(state, GONE, signal.SIGTERM)


def _stop_all(state: State) -> Step:
    return end(state, _stop(_asked_by(state)), signal.SIGTERM)


def _asked_by(state: State) -> int:
    return signal.SIGTERM if state.interrupt is Interrupt.NONE else signal.SIGINT


def _stop(number: int) -> Ending:
    return Ending(128 + number, f"asked to stop by {signal.Signals(number).name}")


def _listen(state: State) -> Step:
    assert state.notice is not None
    seconds = min(QUIET_SECONDS, state.config.grace_seconds * QUIET_SHARE)
    notice = replace(state.notice, last_count=state.notice.count, waits=False)
    return replace(state, notice=notice), (Timer(seconds, Purpose.QUIET),)


def _uncounted(state: State) -> State:
    assert state.notice is not None
    return replace(state, notice=replace(state.notice, count=0, waits=False))


def _state_stays(state: State, leaving: int) -> bool:
    """Whether the training state stays in the round if so many members leave it: its processes train together, or
    enough members were in the last round that did."""
    here, before = state.round, state.trained
    if here is None or before is None or before.number == here.number:
        return True
    had = {member.agent for member in before.members}
    return len([member for member in here.members if member.agent in had]) > leaving


def _is_in_place(state: State) -> bool:
    """Whether the agent's processes train, or have trained and wait for the next round."""
    alive = all(slot.phase is SlotPhase.RUNNING and not slot.killed for slot in state.slots)
    return alive and state.round is not None and (all_ready(state) if state.keeps else not state.over)
