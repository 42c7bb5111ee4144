"""Publishes an empty roster for a job that its queue gives no quota, so that an operator with an old view cannot bring
pods back. Its workers save, as those of a suspended job."""

from __future__ import annotations

from typing import assert_never

from everstep_operator.api.conditions import ReadyReason
from everstep_operator.api.events import EventReason
from everstep_operator.plan.decide.decision import Keep, Publish
from everstep_operator.plan.decide.suspend import no_workers
from everstep_operator.plan.outcome import Event
from everstep_operator.plan.state.admission import Admitted, Leaving, NotQueued, Waiting
from everstep_operator.plan.state.facts import Facts


def when_it_has_no_quota(facts: Facts) -> Publish | Keep | None:
    match facts.admission:
        case NotQueued():
            return None
        case Admitted(_, _, obstacle):
            # Without pods there is nothing to keep: no roster is published before its pods can be made.
            return Keep() if obstacle is not None and not facts.roster.workers else None
        case Waiting():
            return Keep()
        case Leaving(why):
            if not facts.roster.workers:
                return Keep()
            message = f"{why}; the workers save and leave"
            return Publish(no_workers(facts), message, ReadyReason.QUEUED, Event(EventReason.JOB_EVICTED, message))
        case other:
            assert_never(other)
