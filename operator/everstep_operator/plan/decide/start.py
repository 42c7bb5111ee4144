"""Publishes the first roster of a job, and the first after it was suspended."""

from __future__ import annotations

from everstep_operator.api.conditions import ConditionType, ReadyReason
from everstep_operator.api.events import EventReason
from everstep_operator.object_names import number_of_workers
from everstep_operator.plan.decide.decision import Publish
from everstep_operator.plan.outcome import Event
from everstep_operator.plan.state import roster, sizing
from everstep_operator.plan.state.facts import Facts


def when_nothing_is_wanted_yet(facts: Facts) -> Publish | None:
    if facts.roster.wanted > 0:
        return None
    if facts.published is None:
        made = roster.initial(facts.snapshot, facts.wanted, sizing.spares(facts.job.spec))
    else:
        made = facts.successor()
    message = f"creating {number_of_workers(facts.wanted)}"
    before = facts.job.status.condition(ConditionType.READY)
    resumed = before is not None and before.reason == ReadyReason.SUSPENDED
    event = Event(EventReason.JOB_RESUMED, message) if resumed else None
    return Publish(made, message, ReadyReason.PENDING, event)
