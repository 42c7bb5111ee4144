"""Remembers which members have left a job's rounds and not come back.

The agents may be in their next round before the operator sees that a pod has died. Then the round no longer shows who
trained, and a lost member would look like a lost spare. Those that were asked to stop and left at the end of a step are
kept apart: their pods may be gone before the others have reported a step. A new leader begins with those that the
document remembers, and does not know when they left.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from everstep.contract.document import LEFT, Document
from everstep_operator.round_view import RoundView


class Departures:
    """The members that left, by their agents."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[int, int]] = {}  # (index, incarnation) of each agent
        self._drained: set[str] = set()  # those of them that left in order
        self._at: datetime | None = None

    def see(self, before: Document | None, now: Document | None, at: datetime) -> None:
        """The document has changed."""
        if now is None:
            self._left.clear()
            self._drained.clear()
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
        in_order = {loss.agent for loss in now.gone if loss.why == LEFT}
        in_order |= {setback.agent for setback in now.history if setback.why == LEFT}
        self._left, self._drained = left, (self._drained | in_order) & left.keys()

    def added_to(self, view: RoundView) -> RoundView:
        """The view, with the members that have left."""
        if not self._left:
            return view
        drained = frozenset(self._left[agent] for agent in self._drained)
        return replace(view, left=tuple(sorted(self._left.values())), left_at=self._at, drained=drained)


def _remembered(document: Document) -> dict[str, tuple[int, int]]:
    """The agents that have set back a round of which they were members. Those of round 0 were in none."""
    agents = {setback.agent for setback in document.history if setback.round > 0}.difference(document.done)
    return {seat.agent: (seat.index, seat.incarnation) for seat in document.seats if seat.agent in agents}
