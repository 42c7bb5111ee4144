"""The membership machine: applies one event to one document. Pure: no clock, no randomness, no I/O.

`apply(document, event)` gives the new document, or `Rejected` with the reason; nothing else changes a document. With
compare-and-swap underneath, its invariants are the job's:

- A round's number is given once, and numbers only grow. A round never gains members; it only loses them (`gone`).
- An agent that is gone from a round can do nothing in it, and nothing under another round's number; it may ask to join.
- Only a member ends a round that is whole, by asking for the next round. An agent that waits cannot end it.
- An agent that was replaced by a newer incarnation of its worker never comes back.

One change is not made by an agent: the publisher of the job sets its sizes (`sizes`, `ruled`), between any two events.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import assert_never

from everstep.contract import redact
from everstep.contract.document import (
    FINISHED,
    LEFT,
    MAX_HISTORY,
    MAX_INDEX,
    MAX_MEMBERS,
    MAX_REASON,
    MAX_REPORTS,
    PAST_AGENTS,
    Document,
    Loss,
    Member,
    Report,
    Seat,
    Setback,
    Sizes,
)
from everstep.contract.fields import MAX_NUMBER
from everstep.membership import draining
from everstep.membership.commands import (
    Break,
    Charge,
    CloseJob,
    Command,
    Done,
    Drain,
    Evict,
    Form,
    InRound,
    Join,
    KeepProcesses,
    Leave,
    Reach,
    SetBoundary,
    Stop,
    Withdraw,
)
from everstep.membership.formation import selection

# --- index assignment
# Assigns worker indices to agents that join. An assignment is a document under change, with dictionaries in place of
# its tuples: so a thousand agents that join in one swap cost a thousand operations and not a million. Invariants: an
# index has one holder among the agents that are here; its incarnation never falls; an agent that was replaced never
# comes back.


class IndexAssignment:
    """`join` changes it; `document` gives the result."""

    def __init__(self, document: Document) -> None:
        self._before, self._sizes = document, document.sizes
        self._seats = {seat.index: seat for seat in document.seats}
        self._index = {seat.agent: seat.index for seat in reversed(document.seats)}
        self._remaining = {member.agent for member in document.remaining()}
        self._joining = {member.agent: member for member in document.joining}
        self._gone = document.gone
        self._stopping = frozenset(document.stopping)
        self._lowest = 0  # all lower indices have a holder that is here

    def document(self) -> Document:
        """The document, with its lists in order."""
        return replace(
            self._before,
            sizes=self._sizes,
            gone=self._gone,
            joining=tuple(sorted(self._joining.values(), key=lambda m: (m.index, m.agent))),
            seats=tuple(self._seats[index] for index in sorted(self._seats)),
        )

    def join(self, member: Member, sizes: Sizes) -> tuple[str, bool] | None:
        """Let the member join. None if it may, otherwise the reason, and whether it is final."""
        agent = member.agent
        if agent in self._stopping and not self._is_here(agent):
            return f"{agent} was asked to stop, and is out", True
        if sizes != self._sizes and not self._before.ruled:
            if len(self._remaining - {agent}) + len(self._joining.keys() - {agent}):
                return (
                    f"{agent} asks for sizes {sizes}, and this job has {self._sizes}: start all agents with the same"
                    " sizes, or give this job an id of its own"
                ), True
            self._sizes = sizes
        if len(self._joining) >= MAX_MEMBERS and agent not in self._joining:
            return f"{MAX_MEMBERS} agents wait already", False
        if member.index < 0:
            index = self._free_index(agent)
            if index is None:
                return "no worker index is free", False
            member = replace(member, index=index)
        else:
            refused = self._replace_older(member)
            if refused is not None:
                return refused
        refused = self._sit(member)
        if refused is None:
            self._joining[agent] = member
        return refused

    def _is_here(self, agent: str) -> bool:
        return agent in self._remaining or agent in self._joining

    def _free_index(self, agent: str) -> int | None:
        """The index that the agent has, or the lowest that no agent here has."""
        own = self._seats.get(self._index.get(agent, -1))
        if own is not None and own.agent == agent:
            return own.index
        while (seat := self._seats.get(self._lowest)) is not None and self._is_here(seat.agent):
            self._lowest += 1
        for index in range(self._lowest, min(MAX_INDEX, self._lowest + len(self._seats) + 1)):
            seat = self._seats.get(index)
            if seat is None or not (self._is_here(seat.agent) or agent in seat.past):
                return index
        return None

    def _replace_older(self, member: Member) -> tuple[str, bool] | None:
        """Take the seat from an older incarnation of the same worker."""
        seat = self._seats.get(member.index)
        if seat is None or seat.agent == member.agent:
            return None
        if member.agent in seat.past:
            return f"{member.agent} was replaced as worker {member.index} by {seat.agent}", True
        if member.incarnation < seat.incarnation:
            why = f"worker {member.index} has incarnation {seat.incarnation}; {member.agent} is {member.incarnation}"
            return why, True
        self._joining.pop(seat.agent, None)
        if seat.agent in self._remaining:
            self._remaining.discard(seat.agent)
            why = f"replaced by {member.agent}, incarnation {member.incarnation}"
            self._gone = (*self._gone, Loss(seat.agent, why))
        self._seats[member.index] = replace(seat, past=(*seat.past, seat.agent)[-PAST_AGENTS:])
        return None

    def _sit(self, member: Member) -> tuple[str, bool] | None:
        seat = self._seats.get(member.index)
        if seat is None and len(self._seats) >= MAX_MEMBERS:
            self._seats = {index: taken for index, taken in self._seats.items() if self._is_here(taken.agent)}
            if len(self._seats) >= MAX_MEMBERS:
                return f"{MAX_MEMBERS} workers have a seat already", False
        # The greater of the two: an agent without an incarnation must not open the seat to an older incarnation.
        newest = member.incarnation if seat is None else max(member.incarnation, seat.incarnation)
        self._seats[member.index] = Seat(member.index, member.agent, newest, () if seat is None else seat.past)
        self._index[member.agent] = member.index
        return None


# --- machine

MAX_FLAPS = 5  # how often two agents may lose each other before they are kept out of one round


@dataclass(frozen=True, slots=True)
class Rejected:
    """The event changes nothing; `reason` says why, or what it waits for. `final`: it never will change anything."""

    reason: str
    final: bool = False


def apply(document: Document, event: Command) -> Document | Rejected:
    """The document after the event, or why the event was rejected."""
    if document.closed is not None:
        return Rejected(f"the job is closed: {document.closed}", final=True)
    match event:
        case Join():
            return _join(document, event)
        case Leave():
            return _lose(document, event.agent, event.why) or Rejected(f"{event.agent} is not here")
        case Stop():
            return _stop(document, event.agent)
        case Charge():
            return _charge(document, event)
        case CloseJob():
            first = event.outside and document.round == 0
            if not (first or is_here(document, event.by) or _failed_for_good(document, event.by)):
                return Rejected(
                    f"{event.by} is neither in round {document.round} nor waiting: it may not close the job"
                )
            return replace(document, closed=redact.sentence(event.why, MAX_REASON))
        case _:
            return _fence(document, event.by, event.round) or _in_round(document, event)


def _in_round(document: Document, event: InRound) -> Document | Rejected:
    match event:
        case Withdraw():
            return _lose(document, event.by, event.why) or Rejected(f"{event.by} is not here")
        case Drain():
            return _drain(document)
        case Break():
            return _break(document, event.by, event.why)
        case Done():
            return _done(document, event.by)
        case KeepProcesses():
            return replace(document, in_process=True)
        case Evict():
            if event.by == event.agent:
                return Rejected(f"{event.by} may leave or step out, it cannot evict itself")
            return _lose(document, event.agent, event.why) or Rejected(f"{event.agent} is not here")
        case Reach():
            return _reach(document, event)
        case Form():
            return _form(document, event)
        case SetBoundary():
            return _set_boundary(document, event)
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


def _fence(document: Document, by: str, number: int) -> Rejected | None:
    if number != document.round:
        return Rejected(f"{by} decided in round {number}, and round {document.round} is the present one")
    if not is_here(document, by):
        return Rejected(f"{by} is neither in round {number} nor waiting")
    return None


def _lose(document: Document, agent: str, why: str) -> Document | None:
    """The document without the agent; None if the agent was not here."""
    waiting = tuple(member for member in document.joining if member.agent != agent)
    gone = document.gone
    history = document.history
    if is_member(document, agent):
        gone = (*gone, Loss(agent, redact.sentence(why, MAX_REASON)))
        if agent not in document.done:
            history = _remember(document, Setback(document.round, agent, redact.sentence(why, MAX_REASON), False))
    if gone is document.gone and len(waiting) == len(document.joining):
        return None
    return replace(document, joining=waiting, gone=gone, history=history)


def _stop(document: Document, agent: str) -> Document | Rejected:
    if agent in document.stopping or not is_here(document, agent):
        return Rejected(f"{agent} is not here, or known to be asked to stop")
    return replace(document, stopping=draining.marked(document, agent))


def _drain(document: Document) -> Document | Rejected:
    leavers = draining.leavers(document)
    if isinstance(leavers, str):
        return Rejected(leavers)
    for agent in leavers:
        document = _lose(document, agent, LEFT) or document
    return document


def _remember(document: Document, setback: Setback) -> tuple[Setback, ...]:
    return (*document.history, setback)[-MAX_HISTORY:]


def _charge(document: Document, event: Charge) -> Document | Rejected:
    """Charge a failure once a round, because more failures follow from the first one.

    A process that was started after that failure, and fails before the next round, is charged once more: otherwise a
    script that fails before its loop would be restarted for ever. Agents that were in no round are counted apart. A
    repeated charge by the same agent changes nothing: it has not received the first answer."""
    if event.unless_others and any(s.round == event.round and s.agent != event.agent for s in document.history):
        return Rejected("another agent set the round back")
    if event.unless_others and draining.another_asked(document, event.agent):
        return Rejected("another agent is asked to stop")
    charged = [s for s in document.history if s.charged and s.round == event.round]
    own = [s for s in charged if s.agent == event.agent]
    if len(charged if event.round else own) > event.earlier:
        if own:
            return document
        return Rejected(f"a failure in round {event.round} was charged already", final=True)
    if event.round > document.round:
        return Rejected(f"there is no round {event.round} yet", final=True)
    setback = Setback(event.round, event.agent, redact.sentence(event.why, MAX_REASON), True)
    kept = [s for s in document.history if s.charged or (s.round, s.agent) != (event.round, event.agent)]
    return replace(document, restarts=document.restarts + 1, history=(*kept, setback)[-MAX_HISTORY:])


def _failed_for_good(document: Document, agent: str) -> bool:
    """Whether the agent withdrew because its program failed. It is in no round by now, and that failure may have used
    up the restart budget. False if a newer incarnation has its seat."""
    charged = any(s.charged and s.agent == agent for s in document.history)
    return charged and any(seat.agent == agent for seat in document.seats)


def _break(document: Document, by: str, why: str) -> Document | Rejected:
    if not is_member(document, by):
        return Rejected(f"{by} is not in round {document.round}")
    if document.gone or document.broken is not None:
        return Rejected(f"round {document.round} is over already")
    history = _remember(document, Setback(document.round, by, redact.sentence(why, MAX_REASON), False))
    return replace(document, broken=redact.sentence(why, MAX_REASON), history=history)


def _done(document: Document, agent: str) -> Document | Rejected:
    if not is_member(document, agent):
        return Rejected(f"{agent} is not in round {document.round}")
    if agent in document.done:
        return Rejected(f"{agent} has said so already")
    done = (*document.done, agent)
    finished = all(member.agent in done for member in document.members)
    return replace(document, done=done, closed=FINISHED if finished else None)


def join_all(document: Document, joins: Iterable[Join]) -> tuple[Document, list[str]]:
    """Apply all joins that are not refused; the new document, and the agents that were let in."""
    if document.closed is not None:
        return document, []
    assignment = IndexAssignment(document)
    let_in = [join.member.agent for join in joins if assignment.join(join.member, join.sizes) is None]
    return (assignment.document() if let_in else document), let_in


def _join(document: Document, event: Join) -> Document | Rejected:
    assignment = IndexAssignment(document)
    refused = assignment.join(event.member, event.sizes)
    return assignment.document() if refused is None else Rejected(*refused)


def _reach(document: Document, event: Reach) -> Document | Rejected:
    if event.by == event.target or not is_here(document, event.target):
        return Rejected(f"{event.target} is not a peer of {event.by}")
    low, high = sorted((event.by, event.target))
    old = next((r for r in document.reports if (r.low, r.high) == (low, high)), Report(low, high, False, 0))
    if old.active is not event.reaches:
        return Rejected(f"that {low} and {high} do {'' if event.reaches else 'not '}reach each other is known")
    if event.reaches and old.times >= MAX_FLAPS:
        return Rejected(
            f"{low} and {high} lost each other {old.times} times: they are not put together again", final=True
        )
    fresh = replace(old, active=not event.reaches, times=old.times + (0 if event.reaches else 1))
    others = tuple(r for r in document.reports if r != old)
    if len(others) >= MAX_REPORTS:
        return Rejected(f"{MAX_REPORTS} reports are open already")
    document = replace(document, reports=tuple(sorted((*others, fresh), key=lambda r: (r.low, r.high))))
    # No member is removed here: other reports of the same fault may be on their way. The next round is formed when the
    # members are back, and takes all reports into account. If too few members could be in it, the round is left as it
    # is: its traffic resumes with the network.
    both = is_member(document, low) and is_member(document, high)
    if not event.reaches and both and document.broken is None and selection.connected(document):
        why = f"{event.by} does not reach {event.target}"[:MAX_REASON]
        history = _remember(document, Setback(document.round, event.by, why, False))
        document = replace(document, broken=why, history=history)
    return document


def _form(document: Document, event: Form) -> Document | Rejected:
    if not is_waiting(document, event.by):
        return Rejected(f"{event.by} does not wait for a round: it cannot form one")
    members = selection.next_members(document, event.waited, shrink=event.shrink)
    if isinstance(members, str):
        return Rejected(members)
    number = max(document.round, document.floor) + 1
    if number >= MAX_NUMBER:
        return Rejected(f"round {number - 1} is the last that can be counted", final=True)
    taken = {member.agent for member in members}
    left = tuple(member for member in document.joining if member.agent not in taken)
    # A report on a pair outlives the round while both hold their seats: otherwise the two would be put together again.
    seated = {seat.agent for seat in document.seats}
    return replace(
        document,
        round=number,
        members=members,
        gone=(),
        broken=None,
        joining=left,
        reports=tuple(r for r in document.reports if r.low in seated and r.high in seated),
        boundary=None,
        done=(),
        stopping=draining.remembered(document),
    )


def _set_boundary(document: Document, event: SetBoundary) -> Document | Rejected:
    if not is_member(document, event.by) or document.gone or document.broken is not None:
        return Rejected(f"round {document.round} does not run: there is no step to agree on")
    if document.boundary is not None:
        return Rejected(f"round {document.round} ends after step {document.boundary}: agreed already")
    if not 0 <= event.step < MAX_NUMBER:
        return Rejected(f"step {event.step} is no step", final=True)
    return replace(document, boundary=event.step)
