"""The PodDisruptionBudget of an elastic job: how many workers a drain must leave.

Invariants: a job of a fixed size has none, because it would block every drain while the job runs. A job that waits
(for its first pods, for a quorum, suspended) has none: with fewer Ready workers than it asks for it would block every
drain too, and protect no training. A disruption budget with a wrong number is deleted, and created again once it is
gone.
"""

from __future__ import annotations

from typing import Any

from everstep.contract import labels
from everstep_operator import object_names
from everstep_operator.object_names import number_of_workers
from everstep_operator.plan.actions import Action, CreateDisruptionBudget, DeleteDisruptionBudget
from everstep_operator.plan.snapshot import JobView, Snapshot
from everstep_operator.plan.state.facts import Facts


def actions(facts: Facts) -> tuple[Action, ...]:
    """Create the disruption budget that the job needs now, or delete one that it does not need."""
    job, existing = facts.job, facts.snapshot.disruption_budget
    least = _least(facts)
    name = object_names.service_name(job.name)
    if existing is not None and existing.min_available != least:
        why = "no drain has to be held up" if least is None else f"it does not leave {number_of_workers(least)}"
        return (DeleteDisruptionBudget(name, existing.uid, why),)
    if existing is None and least is not None:
        return (CreateDisruptionBudget(name, _body(job, name, least), f"drains leave {number_of_workers(least)}"),)
    return ()


def deletion(snapshot: Snapshot) -> tuple[Action, ...]:
    """Delete the disruption budget of a finished job."""
    existing = snapshot.disruption_budget
    if existing is None:
        return ()
    return (DeleteDisruptionBudget(object_names.service_name(snapshot.job.name), existing.uid, "the job is finished"),)


def _least(facts: Facts) -> int | None:
    spec = facts.job.spec
    if spec.elastic is None or not spec.pod_disruption_budget or facts.roster.wanted == 0:
        return None
    # A recovery with enough workers keeps the budget, so that it is not deleted and created at each loss.
    recovers = facts.snapshot.disruption_budget is not None and facts.ready >= facts.sizes.minimum
    return facts.sizes.minimum if facts.world.has_quorum or recovers else None


def _body(job: JobView, name: str, least: int) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": object_names.metadata(name, job.name, job.namespace, job.uid),
        "spec": {"minAvailable": least, "selector": {"matchLabels": {labels.JOB_UID: job.uid}}},
    }
