"""What follows for an agent when the members of a round have met. Pure, like `machine`, of which it is a part."""

from __future__ import annotations

from dataclasses import replace

from everstep.agent.decide.events import Announce, Formed, Purpose, Timer
from everstep.agent.decide.state import Slot, SlotPhase, State, Step, all_ready, which, with_slots
from everstep.contract.document import LEFT
from everstep.membership.commands import Charge
from everstep.membership.world_state import Round


def formed(state: State, event: Formed) -> Step:
    """The state in the new round, and what is told: whose fault the last one's end was, and the round itself to
    processes that keep their memory."""
    keeps = state.keeps or event.keeps
    state, charge = _settle(state, event.round)
    state = replace(state, round=event.round, over=False, joining=False, done=False, finishing=False, keeps=keeps)
    # What fails from here on is this round's, of whichever process.
    state = replace(state, failures=0, slots=tuple(replace(slot, earlier=0) for slot in state.slots))
    # Who had finished in the last round must repeat what the others lost.
    state = with_slots(state, which(state, SlotPhase.SUCCEEDED), Slot())
    everyone = tuple(range(len(state.slots)))
    # Who is asked to stop and not to leave meets the others too: they save together.
    if not keeps or not all_ready(state):
        return state, charge
    whole = _is_whole(state, event)
    announce = Announce(everyone, event.round, whole)
    if whole:
        return state, (*charge, announce)
    return state, (*charge, announce, Timer(state.config.recovery_seconds, Purpose.COME, event.round.number))


def _settle(state: State, new: Round) -> Step:
    """Whose fault it was when a process said that it lost a peer shows when all meet again, however long a machine
    takes to count as lost: if every member is still there, and none says that it was it, the fault was here."""
    failure, old = state.suspect, state.round
    state = replace(state, suspect=None)
    if failure is None or (old is not None and not {m.agent for m in old.members} <= {m.agent for m in new.members}):
        return state, ()
    charge = Charge(state.config.agent, failure.round, failure.why, unless_others=True, earlier=failure.earlier)
    return replace(state, charges=state.charges + 1), (charge,)


def _is_whole(state: State, new: Formed) -> bool:
    """Whether the members of the round that our processes train in still work together: those that go on, and those
    that leave at the end of a step."""
    old = state.trained
    if old is None or any(slot.trains != old.number for slot in state.slots):
        return False
    if any(setback.round >= old.number and setback.why != LEFT for setback in new.history):
        return False
    here = {member.agent for member in new.round.members} | set(new.stopping)
    return all(member.agent in here for member in old.members)
