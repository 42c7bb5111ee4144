"""The membership machine: what follows from one event on one document. Pure: no clock, no chance, no I/O.

`apply(document, event)` gives the new document, or `Refused` with the reason; nothing else changes a document. With
compare-and-swap underneath, its invariants are the job's:

- A round's number is given once, and only grows; its members never change, they are only lost (`gone`).
- An agent that is gone from a round can do nothing in it, and nothing under another round's number; it may ask to join.
- A round that is whole is ended by its members alone: by one that asks for the next round, not by who waits.
- An agent that a newer life of its worker has replaced never comes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import assert_never

from everstep.rendezvous.document import (
    MAX_MEMBERS,
    MAX_NUMBER,
    MAX_REASON,
    MAX_REPORTS,
    Document,
    Loss,
    Member,
    Report,
    Sizes,
)
from everstep.rendezvous.ranks import assign
from everstep.rendezvous.reachability import largest_set
from everstep.rendezvous.seats import Table

MAX_FLAPS = 3  # times that two agents may lose each other; then they are not put together again


class Waited(IntEnum):
    """For what a proposer has waited, on its own clock, while the document did not change."""

    NOTHING = 0
    LAST_CALL = 1  # for whoever might still come
    REJOIN = 2  # for living members of the present round that do not ask for the next


@dataclass(frozen=True, slots=True)
class Join:
    """`member` asks to be in the next round. Written by itself, or by whoever read its wish."""

    member: Member
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Leave:
    agent: str


@dataclass(frozen=True, slots=True)
class Evict:
    """`by` has proof that `agent` is gone: its lease lapsed, or its address refuses connections."""

    by: str
    round: int
    agent: str
    why: str


@dataclass(frozen=True, slots=True)
class Reach:
    """`by` does (not) reach `target`: no proof of anything about one of them, so the pair is judged."""

    by: str
    round: int
    target: str
    reaches: bool


@dataclass(frozen=True, slots=True)
class Close:
    """Form the round `round` + 1 of those who wait."""

    by: str
    round: int
    waited: Waited


@dataclass(frozen=True, slots=True)
class SetBoundary:
    """The members of a running round let joiners in after `step`."""

    by: str
    round: int
    step: int


@dataclass(frozen=True, slots=True)
class CloseJob:
    by: str
    why: str


Event = Join | Leave | Evict | Reach | Close | SetBoundary | CloseJob


@dataclass(frozen=True, slots=True)
class Refused:
    """The event changes nothing; `reason` says why, or what is waited for. `final`: it never will."""

    reason: str
    final: bool = False


def apply(document: Document, event: Event) -> Document | Refused:
    """The document after the event, or why there is none."""
    if document.closed is not None:
        return Refused(f"the job is closed: {document.closed}", final=True)
    match event:
        case Join():
            return _join(document, event)
        case Leave():
            return _lose(document, event.agent, "left") or Refused(f"{event.agent} is not here")
        case Evict():
            if event.by == event.agent:
                return Refused(f"{event.by} may leave, it cannot evict itself")
            return _fence(document, event.by, event.round) or (
                _lose(document, event.agent, event.why) or Refused(f"{event.agent} is not here")
            )
        case Reach():
            return _fence(document, event.by, event.round) or _reach(document, event)
        case Close():
            return _fence(document, event.by, event.round) or _close(document, event)
        case SetBoundary():
            return _fence(document, event.by, event.round) or _set_boundary(document, event)
        case CloseJob():
            if not is_here(document, event.by):
                return Refused(f"{event.by} is neither in round {document.round} nor waiting: it may not close the job")
            return replace(document, closed=event.why[:MAX_REASON])
        case _:
            assert_never(event)


def is_here(document: Document, agent: str) -> bool:
    """Whether the agent is in the present round and not gone from it, or waits for the next."""
    return is_waiting(document, agent) or is_member(document, agent)


def is_waiting(document: Document, agent: str) -> bool:
    return any(member.agent == agent for member in document.joining)


def is_member(document: Document, agent: str) -> bool:
    return any(member.agent == agent for member in document.members) and all(
        loss.agent != agent for loss in document.gone
    )


def growth(document: Document) -> int:
    """How many more members the round would have if it were formed again now; 0 if that would not make it larger."""
    remaining = document.remaining()
    if not document.joining:
        return 0
    here = {member.agent for member in remaining}
    everyone = (*remaining, *(member for member in document.joining if member.agent not in here))
    return max(0, document.sizes.largest(len(largest_set(everyone, document.reports))) - len(remaining))


def _fence(document: Document, by: str, number: int) -> Refused | None:
    if number != document.round:
        return Refused(f"{by} decided in round {number}, and round {document.round} is the present one")
    if not is_here(document, by):
        return Refused(f"{by} is neither in round {number} nor waiting")
    return None


def _lose(document: Document, agent: str, why: str) -> Document | None:
    """Without the agent; None if it was not here."""
    waiting = tuple(member for member in document.joining if member.agent != agent)
    gone = document.gone
    if is_member(document, agent):
        gone = (*gone, Loss(agent, why[:MAX_REASON]))
    if gone is document.gone and len(waiting) == len(document.joining):
        return None
    return replace(document, joining=waiting, gone=gone)


def join_all(document: Document, joins: Iterable[Join]) -> tuple[Document, list[str]]:
    """The document after all these joins that are not refused, and the agents that were let in."""
    if document.closed is not None:
        return document, []
    table = Table(document)
    let_in = [join.member.agent for join in joins if table.join(join.member, join.sizes) is None]
    return (table.document() if let_in else document), let_in


def _join(document: Document, event: Join) -> Document | Refused:
    table = Table(document)
    refused = table.join(event.member, event.sizes)
    return table.document() if refused is None else Refused(*refused)


def _reach(document: Document, event: Reach) -> Document | Refused:
    if event.by == event.target or not is_here(document, event.target):
        return Refused(f"{event.target} is not a peer of {event.by}")
    low, high = sorted((event.by, event.target))
    old = next((r for r in document.reports if (r.low, r.high) == (low, high)), Report(low, high, False, 0))
    if old.active is not event.reaches:
        return Refused(f"that {low} and {high} do {'' if event.reaches else 'not '}reach each other is known")
    if event.reaches and old.times >= MAX_FLAPS:
        return Refused(
            f"{low} and {high} lost each other {old.times} times: they are not put together again", final=True
        )
    fresh = replace(old, active=not event.reaches, times=old.times + (0 if event.reaches else 1))
    others = tuple(r for r in document.reports if r != old)
    if len(others) >= MAX_REPORTS:
        return Refused(f"{MAX_REPORTS} reports are open already")
    document = replace(document, reports=tuple(sorted((*others, fresh), key=lambda r: (r.low, r.high))))
    # Nobody is taken out: other reports of the same fault may be on their way. The next round is formed in the light of
    # all that have come when the members are back.
    if not event.reaches and is_member(document, low) and is_member(document, high) and document.broken is None:
        document = replace(document, broken=f"{event.by} does not reach {event.target}"[:MAX_REASON])
    return document


def _close(document: Document, event: Close) -> Document | Refused:
    waiting = {member.agent for member in document.joining}
    if event.by not in waiting:
        return Refused(f"{event.by} does not wait for a round: it cannot form one")
    remaining = document.remaining()
    missing = [member.agent for member in remaining if member.agent not in waiting]
    if missing and not document.gone and document.broken is None and len(missing) == len(remaining):
        return Refused(f"round {document.round} runs: its members take in who waits")
    if missing and event.waited < Waited.REJOIN:
        return Refused(f"waiting for {_names(missing)} of round {document.round} to join again")
    pool = largest_set(document.joining, document.reports)
    size = document.sizes.largest(len(pool))
    if size == 0:
        return Refused(f"{len(pool)} of at least {document.sizes.minimum} agents wait")
    if not remaining and size < document.sizes.maximum and event.waited < Waited.LAST_CALL:
        return Refused(f"{len(pool)} of at most {document.sizes.maximum} agents wait: last call")
    if document.round + 1 >= MAX_NUMBER:
        return Refused(f"round {document.round} is the last that can be counted", final=True)
    rank = {member.agent: rank for rank, member in enumerate(remaining)}
    chosen = sorted(pool, key=lambda m: (rank.get(m.agent, MAX_MEMBERS), m.index, m.agent))[:size]
    members = assign(document.members, chosen)
    taken = {member.agent for member in members}
    left = tuple(member for member in document.joining if member.agent not in taken)
    # A pair's report outlives the round while both hold their seats: forgotten, it would be met again.
    seated = {seat.agent for seat in document.seats}
    return replace(
        document,
        round=document.round + 1,
        members=members,
        gone=(),
        broken=None,
        joining=left,
        reports=tuple(r for r in document.reports if r.low in seated and r.high in seated),
        boundary=None,
    )


def _set_boundary(document: Document, event: SetBoundary) -> Document | Refused:
    if not is_member(document, event.by) or document.gone or document.broken is not None:
        return Refused(f"round {document.round} does not run: there is no step to agree on")
    if document.boundary is not None:
        return Refused(f"round {document.round} ends after step {document.boundary}: agreed already")
    if not 0 <= event.step < MAX_NUMBER:
        return Refused(f"step {event.step} is no step", final=True)
    return replace(document, boundary=event.step)


def _names(agents: list[str]) -> str:
    return ", ".join(agents[:5]) + (f" and {len(agents) - 5} more" if len(agents) > 5 else "")
