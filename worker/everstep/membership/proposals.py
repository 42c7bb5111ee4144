"""Computes what an agent that sees a document would write next. Pure.

It knows no store and no clock: the time for which a document has stood unchanged is an argument. Every answer depends
only on the document seen. So an agent whose write failed, or that does not know whether it was accepted, just asks
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from everstep.contract.document import Document, JoinRequest
from everstep.membership.commands import Form, Join, Leave, Waited
from everstep.membership.machine import Rejected, apply, join_all
from everstep.membership.world_state import Closed, Round

MAX_STAGGER = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class Patience:
    """How many seconds the document must stand unchanged before a round is formed without the missing agents.

    `first_call` replaces `last_call` (None: the same) until the maximum number of agents has been seen, because some of
    them may still be starting. `shrink_after` is the time for which an agent waits for replacements of lost members. It
    runs from the agent's join request, whatever changes meanwhile.
    """

    last_call: float = 5.0
    rejoin: float = 45.0  # torchrun gives its processes 30 s to end
    shrink_after: float = 0.0
    first_call: float | None = None

    def call(self, document: Document | None) -> float:
        """How many seconds the last call lasts for this document."""
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
class Proposal:
    """Write this document, if the store's has not changed since."""

    document: Document
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    reason: str


@dataclass(frozen=True, slots=True)
class Admitted:
    round: Round


@dataclass(frozen=True, slots=True)
class Barred:
    """This agent cannot join, now or later."""

    why: str


def outcome(document: Document | None, join_request: JoinRequest) -> Admitted | Closed | None:
    """The result of the join request; None if it is not settled yet."""
    if document is None:
        return None
    if document.closed is not None:
        return Closed(document.closed)
    agent = join_request.member.agent
    if document.round > join_request.after:
        for rank, member in enumerate(document.members):
            if member.agent == agent and member.store_port == join_request.member.store_port:
                return Admitted(Round(document.round, rank, document.members, document.id))
    return None


def is_written(document: Document | None, join_request: JoinRequest) -> bool:
    """Whether the agent waits in the document with this join request, and not with an earlier one."""
    return document is not None and any(
        (member.agent, member.store_port) == (join_request.member.agent, join_request.member.store_port)
        for member in document.joining
    )


def propose_join(
    document: Document | None,
    join_request: JoinRequest,
    present: Mapping[str, JoinRequest],
    waited: Waited,
    *,
    shrink: bool = True,
) -> Proposal | Wait | Barred:
    """A proposal with this join request, all other ones, all losses that presence shows, and the next round if allowed.

    `present` was read after `document`, so an agent that is in the document but not in `present` has expired. `waited`:
    what the proposer has waited for while the document stood unchanged. `shrink`: it has waited long enough for
    replacements. Everything goes into one swap, so that no crash comes between.
    """
    before = document
    agent = join_request.member.agent
    now = Document(join_request.sizes, id=agent) if document is None else document
    now = above(now, (join_request, *present.values()))
    # Expired agents are removed first: their sizes and indices must keep no other agent out.
    cleared, reasons = without_expired(now, agent, present)
    joined = apply(cleared, Join(join_request.member, join_request.sizes))
    if isinstance(joined, Rejected):
        return Barred(joined.reason) if joined.final else Wait(joined.reason)
    if joined != cleared:
        reasons.append(f"{agent} joins")
    now, folded = _fold(joined, agent, present)
    reasons += folded
    # An agent that changes the document has waited for nothing since that change.
    formed = apply(now, Form(agent, now.round, Waited.NOTHING if now != before else waited, shrink))
    if not isinstance(formed, Rejected):
        return Proposal(formed, (*reasons, f"round {formed.round} of {len(formed.members)}"))
    return Proposal(now, tuple(reasons)) if now != before else Wait(formed.reason)


def above(document: Document, join_requests: Iterable[JoinRequest]) -> Document:
    """The document with its round number raised, so that the next round is newer than all rounds of these agents. The
    store may have lost one of those rounds."""
    known = max((join_request.after for join_request in join_requests), default=0)
    return replace(document, floor=known) if known > max(document.floor, document.round) else document


def without_expired(document: Document, by: str, present: Mapping[str, JoinRequest]) -> tuple[Document, list[str]]:
    """The document without the agents that have no presence, and a reason for each of them.

    `by` writes the document. It must be here or join in the same swap, because an agent that is gone from a round may
    change nothing in it.
    """
    reasons = []
    for member in (*document.remaining(), *document.joining):
        agent = member.agent
        if agent == by or agent in present:
            continue
        after = apply(document, Leave(agent, "its lease expired"))
        if not isinstance(after, Rejected):
            document = after
            reasons.append(f"{agent} expired")
    return document, reasons


def _fold(document: Document, me: str, present: Mapping[str, JoinRequest]) -> tuple[Document, list[str]]:
    waiting = {member.agent for member in document.joining}
    # A join request for a round that was formed meanwhile is left out: it is settled, or its owner makes a new one.
    join_requests = [
        join_request
        for agent, join_request in sorted(present.items(), key=lambda item: item[0])
        if agent != me
        and agent not in waiting
        and join_request.after >= document.round
        and join_request.member.agent == agent
    ]
    document, let_in = join_all(
        document, (Join(join_request.member, join_request.sizes) for join_request in join_requests)
    )
    return document, [f"{agent} joins" for agent in let_in]


def stagger(document: Document, agent: str) -> float:
    """Seconds for which this agent lets others go first, so that only one of many writes the same change."""
    everyone = document.joining or document.remaining()
    position = next((i for i, member in enumerate(everyone) if member.agent == agent), len(everyone))
    return min(MAX_STAGGER, 0.05 * position)
