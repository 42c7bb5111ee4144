"""Publishes the first roster of a job, and the first after it was suspended or waited in a queue."""

from __future__ import annotations

from everstep_operator.api.conditions import ConditionType, ReadyReason
from everstep_operator.api.events import EventReason
from everstep_operator.object_names import number_of_pods, number_of_workers
from everstep_operator.plan.decide.decision import Publish
from everstep_operator.plan.outcome import Event
from everstep_operator.plan.state import roster
from everstep_operator.plan.state.admission import Admitted
from everstep_operator.plan.state.facts import Facts


def when_nothing_is_wanted_yet(facts: Facts) -> Publish | None:
    if facts.roster.wanted > 0:
        return None
    if facts.published is None:
        made = roster.initial(facts.snapshot, facts.wanted, facts.kept_spares)
    else:
        made = facts.successor()
    message = f"creating {number_of_workers(facts.wanted)}"
    before = facts.job.status.condition(ConditionType.READY)
    event = None
    if isinstance(facts.admission, Admitted) and facts.admission.workload is not None:
        pods = number_of_pods(facts.admission.pods)
        event = Event(
            EventReason.JOB_ADMITTED, f"queue {facts.admission.workload.queue} has quota for {pods}; {message}"
        )
    elif before is not None and before.reason == ReadyReason.SUSPENDED:
        event = Event(EventReason.JOB_RESUMED, message)
    return Publish(made, message, ReadyReason.PENDING, event)
