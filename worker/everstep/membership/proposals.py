"""What one agent, seeing this, would write next; and what it tells its caller. Pure.

Knows no store and no clock: how long a document has stood unchanged is an argument. Every answer is a function of what
is seen, so an agent that died before or after a write, or never learnt whether its write was taken, just asks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from everstep.contract.document import Document, Member, Wish
from everstep.membership.commands import Form, Join, Leave, Waited
from everstep.membership.draining import divide, enough_stay
from everstep.membership.formation.selection import growth
from everstep.membership.machine import Refused, apply, is_here, is_member, is_waiting, join_all

MAX_STAGGER = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds for which the document must stand unchanged before a round is formed without those who miss.

    `first_call` is in place of `last_call` (None: the same) until as many agents as a round may have were here: some of
    them may still start. `shrink_after` runs from an agent's asking for the next round, whatever changes meanwhile: for
    so long it waits for replacements of who was lost.
    """

    last_call: float = 5.0
    rejoin: float = 45.0  # torchrun gives its processes 30 s to end
    shrink_after: float = 0.0
    first_call: float | None = None

    def call(self, document: Document | None) -> float:
        """Seconds of the last call that holds for this document."""
        if self.first_call is None or (document is not None and len(document.seats) >= document.sizes.maximum):
            return self.last_call
        return self.first_call

    def waited(self, unchanged: float, document: Document | None) -> Waited:
        if document is not None and document.remaining():
            return Waited.REJOIN if unchanged >= self.rejoin else Waited.NOTHING
        return Waited.LAST_CALL if unchanged >= self.call(document) else Waited.NOTHING

    def next_after(self, unchanged: float, document: Document | None) -> float:
        """Seconds until the answer of `waited` changes."""
        wanted = self.rejoin if document is not None and document.remaining() else self.call(document)
        return max(0.0, wanted - unchanged) or self.rejoin


@dataclass(frozen=True, slots=True)
class Round:
    """One agreed membership, as one of its members sees it. `members` are in rank order. `rendezvous`: the document's
    `id`; numbers of two documents have no order."""

    number: int
    rank: int
    members: tuple[Member, ...]
    rendezvous: str = ""

    @property
    def world_size(self) -> int:
        """Members; each may have several processes."""
        return len(self.members)

    @property
    def processes(self) -> int:
        return sum(member.local_world_size for member in self.members)

    @property
    def first_process(self) -> int:
        """The rank of this member's first process."""
        return sum(member.local_world_size for member in self.members[: self.rank])


@dataclass(frozen=True, slots=True)
class Proposal:
    """Write this, if nothing was written since."""

    document: Document
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    reason: str


@dataclass(frozen=True, slots=True)
class Formed:
    round: Round


@dataclass(frozen=True, slots=True)
class Closed:
    why: str


@dataclass(frozen=True, slots=True)
class Barred:
    """This agent cannot join, now or later."""

    why: str


def outcome(document: Document | None, wish: Wish) -> Formed | Closed | None:
    """Whether the wish is settled."""
    if document is None:
        return None
    if document.closed is not None:
        return Closed(document.closed)
    agent = wish.member.agent
    if document.round > wish.after:
        for rank, member in enumerate(document.members):
            if member.agent == agent and member.store_port == wish.member.store_port:
                return Formed(Round(document.round, rank, document.members, document.id))
    return None


def is_written(document: Document | None, wish: Wish) -> bool:
    """Whether the agent waits in the document, with this wish and not one that it made before."""
    return document is not None and any(
        (member.agent, member.store_port) == (wish.member.agent, wish.member.store_port) for member in document.joining
    )


def propose_join(
    document: Document | None, wish: Wish, present: Mapping[str, Wish], waited: Waited, *, shrink: bool = True
) -> Proposal | Wait | Barred:
    """The wish written, with all other wishes and losses that presence shows, and the round formed if that may be.

    `present` was read after `document`: an agent in the document that is not in it has lapsed. `waited` is for how long
    the document stood still; `shrink`: replacements were waited for long enough. Everything goes into one swap, so that
    no crash comes between.
    """
    before = document
    agent = wish.member.agent
    now = Document(wish.sizes, id=agent) if document is None else document
    now = above(now, (wish, *present.values()))
    # First: who lapsed needs no sizes and no index any more, and must bar nobody.
    cleared, reasons = without_lapsed(now, agent, present)
    joined = apply(cleared, Join(wish.member, wish.sizes))
    if isinstance(joined, Refused):
        return Barred(joined.reason) if joined.final else Wait(joined.reason)
    if joined != cleared:
        reasons.append(f"{agent} joins")
    now, folded = _fold(joined, agent, present)
    reasons += folded
    # Whoever changed something has not waited for anything since.
    formed = apply(now, Form(agent, now.round, Waited.NOTHING if now != before else waited, shrink))
    if not isinstance(formed, Refused):
        return Proposal(formed, (*reasons, f"round {formed.round} of {len(formed.members)}"))
    return Proposal(now, tuple(reasons)) if now != before else Wait(formed.reason)


def above(document: Document, wishes: Iterable[Wish]) -> Document:
    """The document, whose next round will be newer than all that these agents were in: its store may have lost one in
    which they were."""
    known = max((wish.after for wish in wishes), default=0)
    return replace(document, floor=known) if known > max(document.floor, document.round) else document


def without_lapsed(document: Document, by: str, present: Mapping[str, Wish]) -> tuple[Document, list[str]]:
    """The document without the agents that have no presence, and who they were.

    `by`, who writes it, is here, or joins in the same swap: who is gone from a round changes nothing in it.
    """
    reasons = []
    for member in (*document.remaining(), *document.joining):
        agent = member.agent
        if agent == by or agent in present:
            continue
        after = apply(document, Leave(agent, "its lease lapsed"))
        if not isinstance(after, Refused):
            document = after
            reasons.append(f"{agent} lapsed")
    return document, reasons


def _fold(document: Document, me: str, present: Mapping[str, Wish]) -> tuple[Document, list[str]]:
    waiting = {member.agent for member in document.joining}
    # A wish for a round that was formed meanwhile is settled, or its owner makes a new one.
    wishes = [
        wish
        for agent, wish in sorted(present.items(), key=lambda item: item[0])
        if agent != me and agent not in waiting and wish.after >= document.round and wish.member.agent == agent
    ]
    document, let_in = join_all(document, (Join(wish.member, wish.sizes) for wish in wishes))
    return document, [f"{agent} joins" for agent in let_in]


@dataclass(frozen=True, slots=True)
class Whole:
    """The round stands."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The round is over for this agent: it must join the next."""

    why: str


@dataclass(frozen=True, slots=True)
class Growing:
    """The round stands, and `count` more agents would make it larger. `boundary`: the step agreed to take them in."""

    count: int
    boundary: int | None


@dataclass(frozen=True, slots=True)
class Finishing:
    """The round stands, and the processes of `count` of its members have succeeded."""

    count: int


@dataclass(frozen=True, slots=True)
class Stopping:
    """The round stands. This agent is asked to stop, and `count` members are; `enough`: the others can go on alone."""

    count: int
    enough: bool


@dataclass(frozen=True, slots=True)
class Left:
    """This agent is asked to stop, and out of the round; the others train on."""


Standing = Whole | Broken | Growing | Finishing | Stopping | Left | Closed


def standing(document: Document | None, number: int, agent: str) -> Standing:
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
        asked, _ = divide(document)
        return Stopping(len(asked), enough_stay(document))
    count = growth(document)
    return Growing(count, document.boundary) if count else Whole()


def _lost(document: Document, agent: str) -> str | None:
    """Who is missed in the round, as `agent` says it."""
    for loss in document.gone:
        if loss.agent == agent:
            return f"this agent is out of it: {loss.why}"
    # Nobody misses who had finished.
    return next((f"{x.agent} is gone: {x.why}" for x in document.gone if x.agent not in document.done), None)


def describe(state: Standing) -> str:
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
        case Stopping(count, enough):
            return f"{count} are asked to stop, and {'enough' if enough else 'too few'} would stay"
        case Left():
            return "this agent is asked to stop, and out"
        case Closed(why):
            return f"closed: {why}"
        case _:
            assert_never(state)


def stagger(document: Document, agent: str) -> float:
    """Seconds by which this agent lets others go first: what many may do, one should do."""
    everyone = document.joining or document.remaining()
    position = next((i for i, member in enumerate(everyone) if member.agent == agent), len(everyone))
    return min(MAX_STAGGER, 0.05 * position)
