"""The world state: a member's view of its round, which is whole, broken, growing, ending or over. Pure.

It is derived from the document alone. Invariant: all members that see one document agree on who is in the round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from everstep.contract.document import Document, Member
from everstep.membership.draining import Coming, Staying, coming, divide, staying
from everstep.membership.formation.selection import growth
from everstep.membership.machine import is_here, is_member, is_waiting


@dataclass(frozen=True, slots=True)
class Round:
    """One agreed membership, as one of its members sees it. `members` are in rank order. `rendezvous`: the document's
    `id`; round numbers of two documents are not comparable."""

    number: int
    rank: int
    members: tuple[Member, ...]
    rendezvous: str = ""

    @property
    def world_size(self) -> int:
        """How many members there are; each may have several processes."""
        return len(self.members)

    @property
    def processes(self) -> int:
        return sum(member.local_world_size for member in self.members)

    @property
    def first_process(self) -> int:
        """The rank of this member's first process."""
        return sum(member.local_world_size for member in self.members[: self.rank])


@dataclass(frozen=True, slots=True)
class Whole:
    """The round stands."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The round is over for this agent: it must join the next."""

    why: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The job is over: no round follows."""

    why: str


@dataclass(frozen=True, slots=True)
class Growing:
    """The round stands, and `count` more agents could join. `boundary`: the agreed step after which they do."""

    count: int
    boundary: int | None


@dataclass(frozen=True, slots=True)
class Finishing:
    """The round stands, and the processes of `count` of its members have succeeded."""

    count: int


@dataclass(frozen=True, slots=True)
class Stopping:
    """The round stands. `count` members are asked to stop, this agent too. `others`: who could go on without them."""

    count: int
    others: Staying
    coming: Coming = Coming.NEVER


@dataclass(frozen=True, slots=True)
class Left:
    """This agent was asked to stop and has left the round; the others train on."""


WorldState = Whole | Broken | Growing | Finishing | Stopping | Left | Closed


def world_state(document: Document | None, number: int, agent: str) -> WorldState:
    """What the document says to a member of round `number`."""
    if document is None or document.round < number:
        return Broken(f"the store has no round {number} any more: it lost what it held")
    if document.closed is not None:
        return Closed(document.closed)
    if agent in document.stopping and not is_here(document, agent):
        return Left()
    if document.round > number:
        return Broken(f"round {document.round} was formed")
    if (lost := _lost(document, agent)) is not None:
        return Broken(lost)
    if document.broken is not None:
        return Broken(document.broken)
    if not is_member(document, agent):
        return Broken(f"this agent is not in round {number}")
    for member in document.members:
        if is_waiting(document, member.agent):
            return Broken(f"{member.agent} asks for the next round")
    if document.done:
        return Finishing(len(document.done))
    if agent in document.stopping:
        stopping, _ = divide(document)
        return Stopping(len(stopping), staying(document), coming(document))
    count = growth(document)
    return Growing(count, document.boundary) if count else Whole()


def _lost(document: Document, agent: str) -> str | None:
    """Which member the round has lost, as a sentence for `agent`; None if it has lost none."""
    for loss in document.gone:
        if loss.agent == agent:
            return f"this agent is out of it: {loss.why}"
    # A member that had finished is not missed.
    return next((f"{x.agent} is gone: {x.why}" for x in document.gone if x.agent not in document.done), None)


def describe(state: WorldState) -> str:
    """One line for a log."""
    match state:
        case Whole():
            return "whole"
        case Broken(why):
            return why
        case Growing(count, boundary):
            return f"{count} more would join" + ("" if boundary is None else f" after step {boundary}")
        case Finishing(count):
            return f"{count} have finished"
        case Stopping(count, others):
            return f"{count} are asked to stop, and {'enough' if others.suffices else 'too few'} would stay"
        case Left():
            return "this agent is asked to stop, and out"
        case Closed(why):
            return f"closed: {why}"
        case _:
            assert_never(state)
