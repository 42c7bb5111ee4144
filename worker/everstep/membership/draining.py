"""Members that are asked to stop: who they are, and whether the others can do without them. Pure.

An agent that is asked to stop says so at once, and trains on for a moment: of a job that is suspended, all say so. What
follows is decided in the document, so that no two members leave because each counted on the other. Invariant: who was
asked to stop and is out of the round does not come back into the job, as long as the document remembers it.
"""

from __future__ import annotations

from everstep.contract.document import MAX_HISTORY, MAX_STOPPING, Document


def divide(document: Document) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The members of the present round that are asked to stop, and those that stay if they leave."""
    here = [member.agent for member in document.remaining()]
    stopping = set(document.stopping)
    return tuple(a for a in here if a in stopping), tuple(a for a in here if a not in stopping)


def enough_stay(document: Document, without: str | None = None) -> bool:
    """Whether those that stay can go on alone; also if one more, `without`, was asked to stop."""
    _, staying = divide(document)
    return document.sizes.largest(len([agent for agent in staying if agent != without])) > 0


def another_asked(document: Document, but: str) -> bool:
    """Whether a member, gone or not, is asked to stop, another than `but`."""
    return any(member.agent in document.stopping for member in document.members if member.agent != but)


def marked(document: Document, agent: str) -> tuple[str, ...]:
    """`stopping` with the agent."""
    return (*document.stopping, agent)[-MAX_STOPPING:]


def leavers(document: Document) -> tuple[str, ...] | str:
    """Who leaves the round now, at the end of a step; or why nobody does."""
    asked, staying = divide(document)
    if document.gone or document.broken is not None or document.done:
        return f"round {document.round} is over or about to end: nobody leaves it at the end of a step"
    if not enough_stay(document):
        return f"{len(staying)} would stay, and sizes are {document.sizes}: all stop together"
    waiting = {member.agent for member in document.joining}
    leaving = tuple(agent for agent in asked if agent not in waiting)
    return leaving or f"no member of round {document.round} is asked to stop, or all that are ask for the next"


def remembered(document: Document) -> tuple[str, ...]:
    """`stopping` in the next round: those that its members were with, and a few before them."""
    near = {member.agent for member in (*document.members, *document.joining)}
    far = set([agent for agent in document.stopping if agent not in near][-MAX_HISTORY:])
    return tuple(agent for agent in document.stopping if agent in near or agent in far)
