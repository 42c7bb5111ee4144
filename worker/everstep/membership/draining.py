"""Finds the members that are asked to stop, and whether the others can go on without them. Pure.

An agent that is asked to stop says so at once, and trains on for a moment. If the job is suspended, all agents say so.
The document decides who leaves, so no two members leave because each counted on the other. Agents that wait for a place
count as those that stay, but only members have the training state, so one of them has to stay. If all are asked to
stop, the first one stays for one round more, and hands the state on to those that were waiting. Invariant: an agent
that was asked to stop and has left the round does not come back into the job, as long as the document remembers it.
"""

from __future__ import annotations

from enum import Enum, auto

from everstep.contract.document import MAX_HISTORY, MAX_STOPPING, Document


class Staying(Enum):
    """Who could go on if all members that are asked to stop left now."""

    NOBODY = auto()  # no member stays, and no other waits: nobody would have the training state
    FEW = auto()  # fewer agents than any allowed size
    ENOUGH = auto()  # a smaller round
    ALL = auto()  # a round as large as this one, or as large as is wanted now

    @property
    def suffices(self) -> bool:
        return self in (Staying.ENOUGH, Staying.ALL)


class Coming(Enum):
    """Whether others may still come for the places of members that are asked to stop."""

    NEVER = auto()  # nobody publishes the job: a terminal's Ctrl-C, or a supervisor
    UNKNOWN = auto()  # its publisher has not announced that more will come; it may have to see first who is asked
    ANNOUNCED = auto()


def divide(document: Document) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The members of the present round that are asked to stop, and those that stay if they leave."""
    here = [member.agent for member in document.remaining()]
    stopping = set(document.stopping)
    return tuple(a for a in here if a in stopping), tuple(a for a in here if a not in stopping)


def staying(document: Document, without: str | None = None) -> Staying:
    """Who could go on, if `without` is asked to stop too."""
    _, members = divide(document)
    staying = len([agent for agent in members if agent != without])
    waiting = len(_replacements(document))
    if staying == 0:
        if waiting == 0 or len(document.remaining()) < 2:
            return Staying.NOBODY
        staying = 1
    size = document.sizes.largest(staying + waiting)
    if size == 0:
        return Staying.FEW
    return Staying.ALL if size >= document.sizes.largest(len(document.remaining())) else Staying.ENOUGH


def coming(document: Document) -> Coming:
    if not document.ruled:
        return Coming.NEVER
    return Coming.ANNOUNCED if document.surge > len(_replacements(document)) else Coming.UNKNOWN


def _replacements(document: Document) -> list[str]:
    """The agents that wait for a place in the next round, and reach all others."""
    here = {member.agent for member in document.members}
    apart = {agent for report in document.reports if report.active for agent in (report.low, report.high)}
    others = here | apart | set(document.stopping)
    return [member.agent for member in document.joining if member.agent not in others]


def another_asked(document: Document, but: str) -> bool:
    """Whether a member other than `but`, gone or not, is asked to stop."""
    return any(member.agent in document.stopping for member in document.members if member.agent != but)


def marked(document: Document, agent: str) -> tuple[str, ...]:
    """`stopping` with the agent."""
    return (*document.stopping, agent)[-MAX_STOPPING:]


def leavers(document: Document) -> tuple[str, ...] | str:
    """The agents that leave the round now, at the end of a step; or why nobody leaves."""
    stopping, members = divide(document)
    if document.gone or document.broken is not None or document.done:
        return f"round {document.round} is over or about to end: nobody leaves it at the end of a step"
    if not staying(document).suffices:
        return f"{len(members)} would stay, and sizes are {document.sizes}: all stop together"
    waiting = {member.agent for member in document.joining}
    last = () if members else stopping[:1]
    leaving = tuple(agent for agent in stopping if agent not in waiting and agent not in last)
    return leaving or f"no member of round {document.round} is asked to stop, or all that are ask for the next"


def remembered(document: Document) -> tuple[str, ...]:
    """`stopping` in the next round: the agents of this round and of the queue, and a few older ones."""
    near = {member.agent for member in (*document.members, *document.joining)}
    far = set([agent for agent in document.stopping if agent not in near][-MAX_HISTORY:])
    return tuple(agent for agent in document.stopping if agent in near or agent in far)
