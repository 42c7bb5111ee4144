"""The agent's state machine: decides what an agent does next. Pure: no clock, no randomness, no I/O.

`decide(state, event)` gives the state after the event, and the instructions that follow. There are two kinds of
processes. Those that *speak* with the agent (they use the session) keep their memory from round to round. The agent
tells them of a new round and replaces only dead ones, while the others train on. All other processes are killed when
their round is over, because they would wait in a collective for ever. They are forked anew for the next round.

Invariants: a process is forked for a round only when no process of an older round is left in its slot; an agent that is
done never leaves a round that stands in order to let others join; each failure is charged at most once; no instruction
follows `Finish`.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import assert_never

from everstep.agent.decide import stopping
from everstep.agent.decide.events import (
    Announce,
    Began,
    Changed,
    Charged,
    Elapsed,
    Entered,
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
    JoinNext,
    Mismatched,
    NotFormed,
    ProcessesFirst,
    Purpose,
    Ready,
    StopRequested,
    Stuck,
    Timer,
    Trains,
)
from everstep.agent.decide.state import (
    Ending,
    Failure,
    Slot,
    SlotPhase,
    State,
    Step,
    all_ready,
    end,
    kill,
    which,
    with_slots,
)
from everstep.contract import exit_codes
from everstep.contract.document import LEFT
from everstep.membership.commands import Break, Charge, CloseJob, Done, KeepProcesses, Withdraw
from everstep.membership.world_state import Broken, Closed, Finishing, Growing, Left, Round, Stopping, Whole

# --- failures
# Decides what a failure of a process costs, and when the job ends by it. Invariants: each failure is charged at most
# once; kills from outside are charged only where there are too many.

MOST_OUTSIDE = 20  # kills from outside per process without progress; more count as the program's fault
FIRST_ROUND = 1


def is_first(state: State) -> bool:
    """Whether the job is known to train its first steps in this round. A process that comes later may be refused before
    it has a step, however far the others are: they go on without it, and it may be started again."""
    round_ = state.round
    if round_ is None or state.over or state.reached > 0:
        return False
    return round_.number <= FIRST_ROUND or (state.trained is not None and state.trained.number == round_.number)


def failed(state: State, failure: Failure, fault: Fault) -> Step:
    instructions: list[Instruction] = []
    if state.round is not None and not state.over and not state.joining:
        # If processes keep their memory, the others go on without this agent. Otherwise all begin again together.
        leave = Withdraw if state.keeps else Break
        instructions.append(leave(state.config.agent, state.round.number, failure.why))
    state = replace(state, over=True)
    if fault is Fault.OUTSIDE:
        state = replace(state, struck=failure.round)
        if state.suspect is not None and state.suspect.round == failure.round:
            state = replace(state, suspect=None)
    # Some failures of the program look like lost peers: two agents may each say that they lost the other, or a process
    # may have no peers yet. So where the job's progress is known, uncharged failures count, and too many are charged.
    if fault is Fault.OUTSIDE or (state.keeps and fault not in (Fault.PROGRAM, Fault.REFUSED)):
        state = replace(state, outside=state.outside + 1)
        if state.outside > MOST_OUTSIDE * len(state.slots):
            fault = Fault.PROGRAM
    match fault:
        case Fault.PROGRAM | Fault.REFUSED:
            state = replace(state, failure=failure)
            if failure.earlier == state.failures:  # otherwise a process that was forked with it has failed before it
                instructions.append(Charge(state.config.agent, failure.round, failure.why, earlier=failure.earlier))
                state = replace(state, failures=state.failures + 1, charges=state.charges + 1)
        case Fault.PEER:
            # The lost peer may be a process of this agent. Then no member will be missing in the next round, although a
            # peer was lost.
            state = replace(state, failure=failure, suspect=failure if state.struck != failure.round else None)
        case Fault.OUTSIDE | Fault.LEAVER:
            pass
        case _:
            assert_never(fault)
    return state, tuple(instructions)


def charged(state: State, restarts: int | None) -> Step:
    count = state.charges if restarts is None else restarts
    if count <= state.config.max_restarts or state.failure is None:
        return state, ()
    failure = state.failure
    code = failure.code if failure.code > 0 else 128 - failure.code
    return end_job(state, code, failure.why + _used_up(state.config.max_restarts))


def end_job(state: State, code: int, why: str) -> Step:
    """End the job at this agent, and also at the others if nothing else restarts the job."""
    state, instructions = end(state, Ending(code, why), signal.SIGKILL)
    return state, ((CloseJob(state.config.agent, why), *instructions) if state.config.alone else instructions)


def _used_up(restarts: int) -> str:
    """The end of a message about a used-up restart budget. Empty if the agent makes no restarts: then the limit is set
    elsewhere."""
    if restarts == 0:
        return ""
    return f"; {'its one restart is' if restarts == 1 else f'all {restarts} restarts are'} used up (--max-restarts)"


# --- forming
# The agent's reaction to a newly formed round. A part of `machine`, and pure like it.


def formed(state: State, event: Formed) -> Step:
    """The state in the new round, and the instructions: perhaps a charge for the end of the last round, and an
    announcement of the new one to processes that keep their memory."""
    keeps = state.keeps or event.keeps
    state, charge = _charge_suspect(state, event.round)
    state = replace(state, round=event.round, over=False, joining=False, done=False, finishing=False, keeps=keeps)
    # From here on every failure counts for this round, whichever process fails.
    state = replace(state, failures=0, slots=tuple(replace(slot, earlier=0) for slot in state.slots))
    # Processes that had finished in the last round must repeat the steps that the others lost.
    state = with_slots(state, which(state, SlotPhase.SUCCEEDED), Slot())
    everyone = tuple(range(len(state.slots)))
    # An agent that is asked to stop but does not leave is in the new round too: all its members save together.
    if not keeps or not all_ready(state):
        return state, charge
    whole = _is_whole(state, event)
    announce = Announce(everyone, event.round, whole)
    if whole:
        return state, (*charge, announce)
    return state, (*charge, announce, Timer(state.config.recovery_seconds, Purpose.COME, event.round.number))


def _charge_suspect(state: State, new: Round) -> Step:
    """Charge this agent for a process that said it had lost a peer, if no peer was lost.

    That shows in the next round, however long it takes until a machine counts as lost: if every old member is in it,
    and no other agent reports the fault, it was here."""
    failure, old = state.suspect, state.round
    state = replace(state, suspect=None)
    if failure is None or (old is not None and not {m.agent for m in old.members} <= {m.agent for m in new.members}):
        return state, ()
    charge = Charge(state.config.agent, failure.round, failure.why, unless_others=True, earlier=failure.earlier)
    return replace(state, charges=state.charges + 1), (charge,)


def _is_whole(state: State, new: Formed) -> bool:
    """Whether the members of the round in which our processes train still work together: members of the new round, and
    members that leave at the end of a step."""
    old = state.trained
    if old is None or any(slot.trains != old.number for slot in state.slots):
        return False
    if any(setback.round >= old.number and setback.why != LEFT for setback in new.history):
        return False
    here = {member.agent for member in new.round.members} | set(new.stopping)
    return all(member.agent in here for member in old.members)


# --- machine

HURT_SECONDS = 1.0  # after a failed collective; if a member died, the round is over within this time
LINGER_SECONDS = 300.0  # for which a done agent waits for the others, as torchrun does
MOST_STALLS = 3  # in a row in one step; more are not chance
FINAL = (exit_codes.FENCED, exit_codes.STORE_UNUSABLE, exit_codes.PREEMPTED)


def decide(state: State, event: Event) -> Step:
    """The next state and the instructions. Total: every event has an answer in every state."""
    if state.finished:
        return state, ()
    state, first = _apply(state, event)
    state, then = _advance(state)
    return state, (*first, *then)


def _apply(state: State, event: Event) -> Step:
    """Apply the event itself; `_advance` adds what follows from the new state."""
    match event:
        case Began(keeps):
            return replace(state, keeps=keeps, announced=keeps), ()
        case Formed():
            return formed(state, event)
        case NotFormed(why, finished):
            code = exit_codes.OK if finished else exit_codes.PREEMPTED if state.notice is not None else 1
            return end(replace(state, joining=False), Ending(code, why), signal.SIGKILL)
        case ProcessesFirst():
            return replace(state, keeps=True, announced=True, joining=False), ()
        case Changed():
            return _changed(state, event)
        case Exited():
            return _exited(state, event)
        case Hello() | Ready() | Entered() | Trains() | Hurt() | Hung():
            slot = state.slots[event.slot]
            known = slot.phase is SlotPhase.RUNNING and slot.pid == event.pid and not slot.killed
            return _reported(state, event) if known else (state, ())
        case Stuck() | Mismatched():
            return _waiting(state, event)
        case Charged(restarts):
            return charged(state, restarts)
        case StopRequested():
            return stopping.requested(state, event)
        case Elapsed(timer):
            return _elapsed(state, timer)
        case _:
            assert_never(event)


# --- rounds


def _changed(state: State, event: Changed) -> Step:
    if state.round is None or event.round != state.round.number or state.joining:
        return state, ()
    match event.world_state:
        case Whole():
            return state, ()
        case Broken():
            return replace(state, over=True), ()
        case Finishing():
            return replace(state, finishing=True), ()
        case Growing():
            return (state if state.done else replace(state, over=True)), ()
        case Stopping():
            return stopping.counted(state, event.world_state)
        case Left():
            return stopping.left(state)
        case Closed(why):
            if state.done:
                return end(state, Ending(exit_codes.OK, why), signal.SIGTERM)
            return end(state, Ending(1, f"the job was closed: {why}"), signal.SIGKILL)
        case _:
            assert_never(event.world_state)


# --- processes


def _exited(state: State, event: Exited) -> Step:
    slot = state.slots[event.slot]
    if slot.pid != event.pid or slot.phase is not SlotPhase.RUNNING:
        return state, ()
    succeeded = event.code == exit_codes.OK and not slot.killed
    after = replace(slot, phase=SlotPhase.SUCCEEDED) if succeeded else Slot(pid=event.pid)
    state = with_slots(state, (event.slot,), after)
    if state.ending is not None:
        if event.code == exit_codes.PREEMPTED and state.ending.code > 128:
            state = replace(state, ending=replace(state.ending, code=exit_codes.PREEMPTED))
        return state, ()
    if succeeded or slot.killed:
        return state, ()
    if event.code in FINAL and event.fault is not Fault.LEAVER:
        return end(state, Ending(event.code, event.why), signal.SIGTERM)
    if event.fault is Fault.REFUSED and is_first(state):
        # A restart could save no training, and the same script would be refused again.
        return end_job(state, event.code, f"{event.why} (the script is refused, and not restarted)")
    number = state.round.number if state.round is not None else 0
    return failed(state, Failure(number, event.code, event.why, slot.earlier), event.fault)


def _reported(state: State, event: Hello | Ready | Entered | Trains | Hurt | Hung) -> Step:
    slot = state.slots[event.slot]
    match event:
        case Hello():
            state = with_slots(state, (event.slot,), replace(slot, speaks=True))
            everyone = all(s.phase is SlotPhase.RUNNING and s.speaks for s in state.slots)
            state = replace(state, keeps=state.keeps or everyone)
            if state.round is None or state.over or state.joining or state.ending is not None:
                return state, ()
            return state, (Announce((event.slot,), state.round, False),)
        case Ready():
            return with_slots(state, (event.slot,), replace(slot, ready=True)), ()
        case Entered(round=number):
            return with_slots(state, (event.slot,), replace(slot, entered=number)), ()
        case Trains(round=number, step=step):
            state = with_slots(state, (event.slot,), replace(slot, entered=max(slot.entered, number), trains=number))
            everyone = all(s.trains == number for s in state.slots)
            if everyone and state.round is not None and state.round.number == number:
                # Only a later step counts as progress: a world may form and fail at the same step again and again.
                outside = 0 if step > state.reached else state.outside
                state = replace(state, trained=state.round, outside=outside, reached=max(step, state.reached))
            return state, ()
        case Hurt(round=number, why=why):
            if state.round is None or number != state.round.number or state.over:
                return state, ()
            return state, (Timer(HURT_SECONDS, Purpose.HURT, number, why),)
        case Hung(why=why, step=step):
            if state.ending is not None:
                return state, ()
            state, instructions = kill(state, (event.slot,), signal.SIGKILL)
            number = state.round.number if state.round is not None else 0
            state = _stalled(state, step)
            fault = Fault.PROGRAM if state.stalls[1] >= MOST_STALLS else Fault.OUTSIDE
            state, then = failed(state, Failure(number, -signal.SIGKILL, why, slot.earlier), fault)
            return state, (*instructions, *then)
        case _:
            assert_never(event)


def _waiting(state: State, event: Stuck | Mismatched) -> Step:
    """All processes of the round wait, and none of them will ever go on."""
    if state.ending is not None or state.round is None or event.round != state.round.number:
        return state, ()
    number, why = event.round, event.why
    if isinstance(event, Stuck):
        if state.over:
            return state, ()
        state = _stalled(state, event.step)
        if state.stalls[1] < MOST_STALLS:
            return replace(state, over=True), (Break(state.config.agent, number, why),)
        why = f"{why}; {MOST_STALLS} times in a row"
    state = replace(state, failure=Failure(number, 1, why), charges=state.charges + 1)
    charge = Charge(state.config.agent, number, why, earlier=state.failures)
    state, instructions = end_job(state, 1, why)
    return state, (charge, *instructions)


def _stalled(state: State, step: int) -> State:
    last, times = state.stalls
    return replace(state, stalls=(step, times + 1 if step == last else 1))


# --- time


def _elapsed(state: State, timer: Timer) -> Step:
    number = state.round.number if state.round is not None else 0
    stands = state.round is not None and not state.over and not state.joining
    match timer.purpose:
        case Purpose.HURT:
            if not stands or timer.round != number or state.ending is not None:
                return state, ()
            return replace(state, over=True), (Break(state.config.agent, number, timer.why),)
        case Purpose.COME:
            if timer.round != number or not stands or state.ending is not None:
                return state, ()
            return _replace_late(state, timer)
        case Purpose.GRACE:
            return kill(state, which(state, SlotPhase.RUNNING), signal.SIGKILL)
        case Purpose.NOTICE:
            return stopping.is_late(state)
        case Purpose.QUIET:
            return stopping.is_quiet(state)
        case Purpose.AGAIN:
            return stopping.hears_again(state), ()
        case Purpose.LINGER:
            if not state.done or timer.round != number or not stands:
                return state, ()
            return end(state, Ending(exit_codes.OK, "the others take longer"), signal.SIGTERM)
        case _:
            assert_never(timer.purpose)


def _replace_late(state: State, timer: Timer) -> Step:
    """Kill processes that keep the new round waiting.

    A process that has not come into the round is killed now. If all have come, here and at other agents, there is one
    more wait of the same length. After that some process is stuck, and since nobody knows which, all that wait are
    killed."""
    live = tuple(i for i in which(state, SlotPhase.RUNNING) if not state.slots[i].killed)
    absent = tuple(i for i in live if state.slots[i].entered < timer.round)
    waiting = tuple(i for i in live if state.slots[i].trains < timer.round)
    if absent or (waiting and timer.why):
        return kill(state, absent or waiting, signal.SIGKILL)
    return state, (replace(timer, why="all have come"),) if waiting else ()


# --- what follows from the state


def _advance(state: State) -> Step:
    live = which(state, SlotPhase.RUNNING)
    if state.notice is not None and state.ending is None:
        state, instructions = stopping.advance(state)
        if state.ending is not None:
            state, then = _advance(state)
            return state, (*instructions, *then)
    if state.ending is not None:
        if live:
            return state, ()
        return replace(state, finished=True), (Finish(state.ending.code, state.ending.why),)
    if state.joining:
        missing = which(state, SlotPhase.EMPTY)
        return _fork(state, missing, None) if missing and state.keeps else (state, ())
    if state.round is None or state.over:
        return _between(state, live)
    return _in_round(state, state.round, live)


def _in_round(state: State, current: Round, live: tuple[int, ...]) -> Step:
    number = current.number
    if all(slot.phase is SlotPhase.SUCCEEDED for slot in state.slots):
        if state.done:
            return state, ()
        linger = Timer(LINGER_SECONDS, Purpose.LINGER, number)
        return replace(state, done=True), (Done(state.config.agent, number), linger)
    if state.keeps and state.finishing and all(slot.trains < number for slot in state.slots) and not state.done:
        # A round forms in all processes or in none. The others had finished when this agent was taken into the round.
        if live:
            return kill(state, live, signal.SIGKILL)
        return replace(state, done=True), (Done(state.config.agent, number),)
    if not state.keeps:
        if not live:
            return _fork(state, tuple(range(len(state.slots))), current)
        return kill(state, live, signal.SIGKILL) if which(state, SlotPhase.EMPTY) else (state, ())
    if not all(_in_place(slot, number) for slot in state.slots):
        state, then = _advance(replace(state, over=True))
        return state, (Withdraw(state.config.agent, number, "a process ended"), *then)
    if not state.announced and all_ready(state):
        return replace(state, announced=True), (KeepProcesses(state.config.agent, number),)
    return state, ()


def _in_place(slot: Slot, number: int) -> bool:
    if slot.phase is SlotPhase.RUNNING:
        return not slot.killed and (slot.ready or slot.born == number)
    # A process that trained in an older round and succeeded is not in place: the others would wait for it. A process
    # that never trained needs no round: its script has no steps.
    return slot.phase is SlotPhase.SUCCEEDED and not 0 < max(slot.entered, slot.trains) < number


def _between(state: State, live: tuple[int, ...]) -> Step:
    """No round stands: bring the processes into the state that a join needs, then ask for the next round."""
    after = state.round.number if state.round is not None else 0
    if not state.keeps:
        state, instructions = kill(state, live, signal.SIGKILL)
        return replace(state, joining=True), (*instructions, JoinNext(after))
    if live and which(state, SlotPhase.SUCCEEDED):
        return kill(state, live, signal.SIGKILL)
    missing = tuple(i for i, slot in enumerate(state.slots) if slot.phase is not SlotPhase.RUNNING)
    if missing:
        return _fork(state, missing, None)
    if all_ready(state):
        return replace(state, joining=True), (JoinNext(after),)
    return state, ()


def _fork(state: State, slots: tuple[int, ...], current: Round | None) -> Step:
    """Fork processes into these slots; `started` gives their pids later."""
    born = current.number if current is not None else 0
    return with_slots(state, slots, Slot(SlotPhase.RUNNING, born=born, earlier=state.failures)), (Fork(slots, current),)
