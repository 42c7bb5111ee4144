"""Finds the members that are asked to stop, and whether the others can go on without them. Pure.

An agent that is asked to stop says so at once, and trains on for a moment. If the job is suspended, all agents say so.
The document decides who leaves, so no two members leave because each counted on the other. Invariant: an agent that was
asked to stop and has left the round does not come back into the job, as long as the document remembers it.
"""

from __future__ import annotations

from everstep.contract.document import MAX_HISTORY, MAX_STOPPING, Document


def divide(document: Document) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The members of the present round that are asked to stop, and those that stay if they leave."""
    here = [member.agent for member in document.remaining()]
    stopping = set(document.stopping)
    return tuple(a for a in here if a in stopping), tuple(a for a in here if a not in stopping)


def enough_stay(document: Document, without: str | None = None) -> bool:
    """Whether those that stay can go on alone, even if `without` is asked to stop too."""
    _, staying = divide(document)
    return document.sizes.largest(len([agent for agent in staying if agent != without])) > 0


def another_asked(document: Document, but: str) -> bool:
    """Whether a member other than `but`, gone or not, is asked to stop."""
    return any(member.agent in document.stopping for member in document.members if member.agent != but)


def marked(document: Document, agent: str) -> tuple[str, ...]:
    """`stopping` with the agent."""
    return (*document.stopping, agent)[-MAX_STOPPING:]


def leavers(document: Document) -> tuple[str, ...] | str:
    """The agents that leave the round now, at the end of a step; or why nobody leaves."""
    stopping, staying = divide(document)
    if document.gone or document.broken is not None or document.done:
        return f"round {document.round} is over or about to end: nobody leaves it at the end of a step"
    if not enough_stay(document):
        return f"{len(staying)} would stay, and sizes are {document.sizes}: all stop together"
    waiting = {member.agent for member in document.joining}
    leaving = tuple(agent for agent in stopping if agent not in waiting)
    return leaving or f"no member of round {document.round} is asked to stop, or all that are ask for the next"


def remembered(document: Document) -> tuple[str, ...]:
    """`stopping` in the next round: the agents of this round and of the queue, and a few older ones."""
    near = {member.agent for member in (*document.members, *document.joining)}
    far = set([agent for agent in document.stopping if agent not in near][-MAX_HISTORY:])
    return tuple(agent for agent in document.stopping if agent in near or agent in far)
