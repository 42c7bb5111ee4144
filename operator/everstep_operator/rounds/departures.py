"""Remembers which members have left a job's rounds and not come back.

The agents may be in their next round before the operator sees that a pod has died. Then the round no longer shows who
trained, and a lost member would look like a lost spare. A new leader begins with those that the document remembers, and
does not know when they left.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from everstep.contract.document import Document
from everstep_operator.round_view import RoundView


class Departures:
    """The members that left, by their agents."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[int, int]] = {}  # (index, incarnation) of each agent
        self._at: datetime | None = None

    def see(self, before: Document | None, now: Document | None, at: datetime) -> None:
        """The document has changed."""
        if now is None:
            self._left.clear()
            return
        here = {member.agent for member in (*now.remaining(), *now.joining)}
        # An agent that was replaced never comes back.
        seated = {seat.agent for seat in now.seats}
        known = self._left if before is not None else _remembered(now)
        left = {agent: worker for agent, worker in known.items() if agent not in here and agent in seated}
        if before is not None:
            trained = {member.agent: (member.index, member.incarnation) for member in before.remaining()}
            fresh = {agent: worker for agent, worker in trained.items() if agent not in here and agent not in now.done}
            self._at = at if fresh else self._at
            left |= fresh
        self._left = left

    def added_to(self, view: RoundView) -> RoundView:
        """The view, with the members that have left."""
        if not self._left:
            return view
        return replace(view, left=tuple(sorted(self._left.values())), left_at=self._at)


def _remembered(document: Document) -> dict[str, tuple[int, int]]:
    """The agents that have set back a round of which they were members. Those of round 0 were in none."""
    agents = {setback.agent for setback in document.history if setback.round > 0}.difference(document.done)
    return {seat.agent: (seat.index, seat.incarnation) for seat in document.seats if seat.agent in agents}
