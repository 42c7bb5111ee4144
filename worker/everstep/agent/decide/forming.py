"""The agent's reaction to a newly formed round. A part of `machine`, and pure like it."""

from __future__ import annotations

from dataclasses import replace

from everstep.agent.decide.events import Announce, Formed, Purpose, Timer
from everstep.agent.decide.state import Slot, SlotPhase, State, Step, all_ready, which, with_slots
from everstep.contract.document import LEFT
from everstep.membership.commands import Charge
from everstep.membership.world_state import Round


def formed(state: State, event: Formed) -> Step:
    """The state in the new round, and the instructions: perhaps a charge for the end of the last round, and an
    announcement of the new one to processes that keep their memory."""
    keeps = state.keeps or event.keeps
    state, charge = _settle(state, event.round)
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


def _settle(state: State, new: Round) -> Step:
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
