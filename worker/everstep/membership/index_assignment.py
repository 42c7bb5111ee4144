"""Assigns worker indices to agents that join. Pure.

An assignment is a document under change, with dictionaries in place of its tuples: so a thousand agents that join in
one swap cost a thousand operations and not a million. Invariants: an index has one holder among the agents that are
here; its incarnation never falls; an agent that was replaced never comes back.
"""

from __future__ import annotations

from dataclasses import replace

from everstep.contract.document import MAX_INDEX, MAX_MEMBERS, PAST_AGENTS, Document, Loss, Member, Seat, Sizes


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
            self._seats = {index: one for index, one in self._seats.items() if self._is_here(one.agent)}
            if len(self._seats) >= MAX_MEMBERS:
                return f"{MAX_MEMBERS} workers have a seat already", False
        # The greater of the two: an agent without an incarnation must not open the seat to an older incarnation.
        newest = member.incarnation if seat is None else max(member.incarnation, seat.incarnation)
        self._seats[member.index] = Seat(member.index, member.agent, newest, () if seat is None else seat.past)
        self._index[member.agent] = member.index
        return None
