"""Decides what a failure of a process costs, and when the job ends by it. Pure.

Invariants: each failure is charged at most once; kills from outside are charged only where there are too many.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import assert_never

from everstep.agent.decide.events import Fault, Instruction
from everstep.agent.decide.state import Ending, Failure, State, Step, end
from everstep.membership.commands import Break, Charge, CloseJob, Withdraw

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
    told: list[Instruction] = []
    if state.round is not None and not state.over and not state.joining:
        # If processes keep their memory, the others go on without this agent. Otherwise all begin again together.
        leave = Withdraw if state.keeps else Break
        told.append(leave(state.config.agent, state.round.number, failure.why))
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
                told.append(Charge(state.config.agent, failure.round, failure.why, earlier=failure.earlier))
                state = replace(state, failures=state.failures + 1, charges=state.charges + 1)
        case Fault.PEER:
            # The lost peer may be a process of this agent. Then no member will be missing in the next round, although a
            # peer was lost.
            state = replace(state, failure=failure, suspect=failure if state.struck != failure.round else None)
        case Fault.OUTSIDE | Fault.LEAVER:
            pass
        case _:
            assert_never(fault)
    return state, tuple(told)


def charged(state: State, restarts: int | None) -> Step:
    count = state.charges if restarts is None else restarts
    if count <= state.config.max_restarts or state.failure is None:
        return state, ()
    failure = state.failure
    code = failure.code if failure.code > 0 else 128 - failure.code
    return end_job(state, code, failure.why + _used_up(state.config.max_restarts))


def end_job(state: State, code: int, why: str) -> Step:
    """End the job at this agent, and also at the others if nothing else restarts the job."""
    state, told = end(state, Ending(code, why), signal.SIGKILL)
    return state, ((CloseJob(state.config.agent, why), *told) if state.config.alone else told)


def _used_up(restarts: int) -> str:
    """The end of a message about a used-up restart budget. Empty if the agent makes no restarts: then the limit is set
    elsewhere."""
    if restarts == 0:
        return ""
    return f"; {'its one restart is' if restarts == 1 else f'all {restarts} restarts are'} used up (--max-restarts)"
