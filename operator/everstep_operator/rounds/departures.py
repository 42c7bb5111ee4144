"""Remembers which members have left a job's rounds and not come back.

The agents may be in their next round before the operator sees that a pod has died. Then the round no longer shows who
trained, and a lost member would look like a lost spare. In this leader's memory only: a new leader begins empty.
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
        left = {agent: worker for agent, worker in self._left.items() if agent not in here and agent in seated}
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
