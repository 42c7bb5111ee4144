"""Remembers the processes that ended in a job's rounds, and that their agents replace without a word to anybody.

The agents are in their next round within a fraction of a second, often before a pass reads the job. By then the
document no longer shows when a round ended, and by which process. In this leader's memory only: what ended before it
read the document was the last leader's to report.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from everstep.contract import process_end
from everstep.contract.document import Document
from everstep_operator.round_view import ProcessEnd, RoundView

MAX_ENDS = 16  # the newest; a pass reads them long before there are more


def with_end(ends: tuple[ProcessEnd, ...], end: ProcessEnd) -> tuple[ProcessEnd, ...]:
    """The ends, with one more: of each round the first one counts the others."""
    if ends and ends[-1].round == end.round:
        return (*ends[:-1], replace(ends[-1], more=ends[-1].more + 1))
    return (*ends, end)[-MAX_ENDS:]


class ProcessEnds:
    """Of each round the first such process, oldest first, and how many more of that round."""

    def __init__(self) -> None:
        self._ends: tuple[ProcessEnd, ...] = ()

    def see(self, before: Document | None, now: Document | None, at: datetime) -> None:
        """The document has changed."""
        if before is None or now is None or now.history == before.history:
            return
        known = {(setback.round, setback.agent) for setback in before.history}
        workers = {member.agent: (member.index, member.incarnation) for member in (*before.members, *now.members)}
        for setback in now.history:
            replaced = process_end.read(setback.why)
            if replaced is None or (setback.round, setback.agent) in known or setback.agent not in workers:
                continue
            index, incarnation = workers[setback.agent]
            end = ProcessEnd(setback.round, index, incarnation, at, replaced.detail, replaced.stood_seconds)
            self._ends = with_end(self._ends, end)

    def added_to(self, view: RoundView) -> RoundView:
        """The view, with these processes."""
        return replace(view, ends=self._ends) if self._ends else view
