"""The PodDisruptionBudget of an elastic job: how many workers a drain must leave.

Invariant: a job of a fixed size has none, because it would block every drain while the job runs. A disruption budget
with a wrong number is deleted, and created again once it is gone.
"""

from __future__ import annotations

from typing import Any

from everstep.contract import labels
from everstep_operator.plan import names
from everstep_operator.plan.actions import Action, CreateDisruptionBudget, DeleteDisruptionBudget
from everstep_operator.plan.snapshot import JobView, Snapshot
from everstep_operator.plan.state import sizing


def actions(snapshot: Snapshot) -> tuple[Action, ...]:
    """Create the disruption budget that the spec asks for, or delete one that it does not ask for."""
    job, there = snapshot.job, snapshot.disruption_budget
    least = _least(job)
    name = names.service_name(job.name)
    if there is not None and there.min_available != least:
        why = "no drain has to be held up" if least is None else f"it does not leave {least} workers"
        return (DeleteDisruptionBudget(name, there.uid, why),)
    if there is None and least is not None:
        return (CreateDisruptionBudget(name, _body(job, name, least), f"drains leave {least} workers"),)
    return ()


def gone(snapshot: Snapshot) -> tuple[Action, ...]:
    """Delete the disruption budget of a finished job."""
    there = snapshot.disruption_budget
    if there is None:
        return ()
    return (DeleteDisruptionBudget(names.service_name(snapshot.job.name), there.uid, "the job is finished"),)


def _least(job: JobView) -> int | None:
    spec = job.spec
    if spec.elastic is None or not spec.pod_disruption_budget or spec.suspend:
        return None
    return sizing.bounds(spec).minimum


def _body(job: JobView, name: str, least: int) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": names.metadata(name, job.name, job.namespace, job.uid),
        "spec": {"minAvailable": least, "selector": {"matchLabels": {labels.JOB_UID: job.uid}}},
    }
