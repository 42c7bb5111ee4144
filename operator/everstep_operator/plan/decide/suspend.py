"""Publishes an empty roster for a suspended job, so that an operator with an old view cannot bring pods back."""

from __future__ import annotations

from everstep_operator.api.conditions import ReadyReason
from everstep_operator.api.events import EventReason
from everstep_operator.plan.decide.decision import Keep, Publish
from everstep_operator.plan.outcome import Event
from everstep_operator.plan.state import roster
from everstep_operator.plan.state.facts import Facts


def when_suspended(facts: Facts) -> Publish | Keep | None:
    if not facts.job.spec.suspend:
        return None
    none = no_workers(facts)
    if none == facts.roster:
        return Keep()
    message = "spec.suspend is true: no workers"
    return Publish(none, message, ReadyReason.SUSPENDED, Event(EventReason.JOB_SUSPENDED, message))


def no_workers(facts: Facts) -> roster.Roster:
    """The empty roster. A job that was created suspended and never had pods needs none."""
    if facts.published is None:
        return roster.initial(facts.snapshot, 0)
    made = roster.successor(facts.snapshot, facts.roster, 0, facts.roster.workers, replaced=False)
    return roster.raised_to_pods(facts.snapshot, made)
