"""The PodGroup of a job: a scheduler that knows it places as many workers as the smallest size has, or none.

Half a job that holds accelerators, and waits for the other half, holds them for nothing; two such jobs wait for each
other for ever. Three schedulers have a kind named PodGroup, in API groups of their own (ADR 0071). All pods of the job
are in its one group, spares too: a worker that replaces a lost one finds the others in it, and is placed at once. The
job owns the group. Invariants: no pod is created before its group is there. A group is gone while the job wants no
workers, because some schedulers keep room for a group without pods.
"""

from __future__ import annotations

import json
from typing import Any

from everstep.contract import labels
from everstep_operator import object_names
from everstep_operator.api.types import GangScheduler, PodGroup
from everstep_operator.object_names import number_of_workers
from everstep_operator.plan.actions import Action, CreatePodGroup, DeletePodGroup, PatchPodGroup
from everstep_operator.plan.snapshot import JobView, PodGroupView, Snapshot
from everstep_operator.plan.state.facts import Facts

MADE_OF = f"{labels.GROUP}/made-of"  # annotation: what cannot be changed in a group
API_VERSIONS = {
    GangScheduler.KUBERNETES: "scheduling.k8s.io/v1beta1",
    GangScheduler.COSCHEDULING: "scheduling.x-k8s.io/v1alpha1",
    GangScheduler.VOLCANO: "scheduling.volcano.sh/v1beta1",
}
COSCHEDULING_LABEL = "scheduling.x-k8s.io/pod-group"  # of a pod
VOLCANO_ANNOTATION = "scheduling.k8s.io/group-name"  # of a pod


def actions(facts: Facts) -> tuple[Action, ...]:
    """Create the group, change its smallest number of pods, or delete one that was made of something else."""
    wanted, least = _wanted(facts), facts.sizes.minimum
    name, kept = object_names.service_name(facts.job.name), None
    made: list[Action] = []
    for group in facts.snapshot.pod_groups:
        if wanted is not None and _is_of(group, facts.job, wanted):
            kept = group
        elif not group.deleting:
            why = "no worker is wanted" if wanted is None else "it was made of an older spec"
            made.append(DeletePodGroup(group.scheduler, name, group.uid, why))
    if wanted is None:
        return tuple(made)
    if kept is None and not any(group.scheduler is wanted.scheduler for group in facts.snapshot.pod_groups):
        why = f"{number_of_workers(least)} start together, or none"
        made.append(CreatePodGroup(wanted.scheduler, name, _body(facts.job, wanted, name, least), why))
    elif kept is not None and kept.least != least:
        spec = _of_least(wanted.scheduler, least)
        made.append(PatchPodGroup(wanted.scheduler, name, kept.uid, spec, f"{number_of_workers(least)} start together"))
    return tuple(made)


def obstacle(facts: Facts) -> str | None:
    """Why no pod may be created yet; None if nothing is in the way."""
    wanted, groups = facts.job.spec.pod_group, facts.snapshot.pod_groups
    if wanted is None or all(g.scheduler is not wanted.scheduler or _is_of(g, facts.job, wanted) for g in groups):
        return None
    return "the PodGroup of an older spec is being deleted"


def deletion(snapshot: Snapshot) -> tuple[Action, ...]:
    """Delete the groups of a finished job."""
    name = object_names.service_name(snapshot.job.name)
    groups = (group for group in snapshot.pod_groups if not group.deleting)
    return tuple(DeletePodGroup(group.scheduler, name, group.uid, "the job is finished") for group in groups)


def put_in(job: JobView, body: dict[str, Any]) -> None:
    """Put a pod into the job's group."""
    group = job.spec.pod_group
    if group is None:
        return
    name, spec = object_names.service_name(job.name), body["spec"]
    match group.scheduler:
        case GangScheduler.KUBERNETES:
            spec["schedulingGroup"] = {"podGroupName": name}
        case GangScheduler.COSCHEDULING:
            body["metadata"]["labels"][COSCHEDULING_LABEL] = name
        case GangScheduler.VOLCANO:
            body["metadata"]["annotations"][VOLCANO_ANNOTATION] = name
            spec["schedulerName"] = spec.get("schedulerName") or "volcano"


def least_of(scheduler: GangScheduler, spec: dict[str, Any]) -> int | None:
    """The smallest number of pods that a group's spec asks for; None if it does not say."""
    least = spec.get("minMember")
    if scheduler is GangScheduler.KUBERNETES:
        least = ((spec.get("schedulingPolicy") or {}).get("gang") or {}).get("minCount")
    return least if isinstance(least, int) else None


def _wanted(facts: Facts) -> PodGroup | None:
    """What the group has to be made of; None: there is to be none."""
    group = facts.job.spec.pod_group
    may = group is not None and group.scheduler in facts.snapshot.settings.pod_groups
    is_idle = facts.roster.wanted == 0 and not facts.snapshot.pods
    return group if may and not is_idle else None


def _is_of(group: PodGroupView, job: JobView, wanted: PodGroup) -> bool:
    return group.scheduler is wanted.scheduler and not group.deleting and group.made_of == _made_of(job, wanted)


def _made_of(job: JobView, wanted: PodGroup) -> str:
    return json.dumps(_fixed(job, wanted), sort_keys=True)


def _fixed(job: JobView, wanted: PodGroup) -> dict[str, Any]:
    """What never changes in a group. Schedulers compare groups by the priority of the group, not of its pods."""
    priority = (job.spec.template.get("spec") or {}).get("priorityClassName")
    of_others = wanted.scheduler is not GangScheduler.COSCHEDULING  # which compares the pods
    values = {
        "priorityClassName": priority if of_others else None,
        "queue": wanted.queue,
        "scheduleTimeoutSeconds": wanted.schedule_timeout_seconds,
    }
    return {key: value for key, value in values.items() if value}


def _of_least(scheduler: GangScheduler, least: int) -> dict[str, Any]:
    if scheduler is GangScheduler.KUBERNETES:
        return {"schedulingPolicy": {"gang": {"minCount": least}}}
    return {"minMember": least}


def _body(job: JobView, wanted: PodGroup, name: str, least: int) -> dict[str, Any]:
    ours = object_names.metadata(name, job.name, job.namespace, job.uid)
    return {
        "apiVersion": API_VERSIONS[wanted.scheduler],
        "kind": "PodGroup",
        "metadata": {**ours, "annotations": {MADE_OF: _made_of(job, wanted)}},
        "spec": {**_of_least(wanted.scheduler, least), **_fixed(job, wanted)},
    }
