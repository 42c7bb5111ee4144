"""Replaces workers whose pods were made from an older spec: two programs in one world would train a model that
nobody wrote.

A running job refuses such an edit. But a job may be suspended, edited and resumed before the operator looks, or the
admission policy is off. Then its workers are replaced in one orderly change, as by a suspension: uncharged, with the
grace period of the template to commit, and their successors are created when they have ended (`render.converge`).
"""

from __future__ import annotations

from everstep_operator.api.conditions import ReadyReason
from everstep_operator.api.events import EventReason
from everstep_operator.object_names import list_of_workers, resizing
from everstep_operator.plan.decide.decision import Publish
from everstep_operator.plan.outcome import Event
from everstep_operator.plan.state.facts import Facts


def when_the_backend_has_changed(facts: Facts) -> Publish | None:
    """Pods of another backend are none of the workers, which look lost therefore. Nothing has failed."""
    if facts.current or not facts.lost:
        return None
    others = {pod.index for pod in facts.snapshot.pods if pod.uid in facts.outdated_pods}
    return _update(facts, frozenset(facts.roster.workers)) if others & facts.roster.workers.keys() else None


def when_workers_are_of_an_older_spec(facts: Facts) -> Publish | None:
    # Replaced workers need all peers, so a worker that has succeeded is replaced with them.
    return _update(facts, facts.outdated | facts.succeeded) if facts.outdated else None


def _update(facts: Facts, replaced: frozenset[int]) -> Publish:
    workers = "the world" if facts.roster.replaces_all else list_of_workers(replaced)
    message = f"the spec has changed: replacing {workers}"
    if facts.wanted != facts.roster.wanted:
        message += f", and {resizing(facts.roster.wanted, facts.wanted)}"
    # Failures of the old program do not count for the new one.
    restarts = facts.job.status.restarts.model_copy(update={"start_failures": 0, "mismatch": None})
    event = Event(EventReason.WORKERS_UPDATED, message)
    return Publish(facts.successor(replaced), message, ReadyReason.UPDATING, event, restarts)
