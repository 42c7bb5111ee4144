"""Reads what Kueue says of a job: its Workloads, and the flavors and priority classes that they name.

Invariant: Workloads that could not be listed are `unread`, and never none: a job that trains would lose its quota.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from everstep_operator.controller.caches import BY_OWNER, QueueCaches
from everstep_operator.kube.resources import PRIORITY_CLASSES, WORKLOAD_PRIORITY_CLASSES, Resource
from everstep_operator.kube.wire import PriorityClass, Unstructured
from everstep_operator.plan.render.workloads import MADE_FROM, POD_SET, REPLACES
from everstep_operator.plan.snapshot import JobView, PodChanges, QueueView, WorkloadView
from everstep_operator.plan.state import admission, charged
from everstep_operator.runtime.informer import Informer
from everstep_operator.runtime.informers import EVERYWHERE

QUEUE_NAME = f"{charged.KUEUE}queue-name"  # a label of a job, as of every kind that Kueue knows
PRIORITY_CLASS = f"{charged.KUEUE}priority-class"  # the same: the name of a WorkloadPriorityClass
MULTIKUEUE = f"{charged.KUEUE}multikueue"


def queue_name(job: Unstructured) -> str | None:
    return job.metadata.labels.get(QUEUE_NAME) or None


def queue_view(caches: QueueCaches, obj: Unstructured, job: JobView) -> QueueView | None:
    """What concerns the job's queue; None if it has none."""
    name = queue_name(obj)
    owned = caches.workloads.by_index(BY_OWNER, job.uid)
    if (unread := _unread(caches, job.namespace, owned)) is not None:
        return None if name is None else QueueView(name, unread=unread)
    workloads = tuple(sorted(map(workload_view, owned), key=lambda each: (each.number, each.name)))
    view = QueueView(name, workloads)
    if name is None:
        return view if admission.unfinished(view) else None
    priority = _priority(caches, obj, job)
    reserved = admission.reserved(view)
    of_quota = next((each for each in owned if reserved is not None and each.metadata.uid == reserved.uid), None)
    changes = _Changes() if of_quota is None else _changes(caches.flavors, of_quota)
    return QueueView(
        name,
        workloads,
        priority.value,
        priority.reference,
        refusal=priority.refusal,
        changes=changes.made,
        obstacle=changes.obstacle,
    )


def workload_view(obj: Unstructured) -> WorkloadView:
    """Somebody may have edited it: what cannot be read is as if it were not there."""
    spec, status = obj.spec, obj.status
    pod_set = next(_maps(spec.get("podSets")), {})
    conditions = tuple(_maps(status.get("conditions")))
    by_type = {str(each.get("type")): each for each in conditions}
    reserved = _holds(by_type, "QuotaReserved")
    assignment = _assignment(status)
    waits = by_type.get("QuotaReserved", {}) if not reserved else {}
    evicted = by_type.get("Evicted", {}) if _holds(by_type, "Evicted") else {}
    reclaimable = sum(_count(each.get("count")) for each in _maps(status.get("reclaimablePods")))
    number = obj.metadata.name.rpartition("-")[2]
    minimum = pod_set.get("minCount")
    ready = by_type.get("PodsReady")
    replaces = obj.metadata.annotations.get(REPLACES, "").rpartition("/")[2]
    return WorkloadView(
        name=obj.metadata.name,
        uid=obj.metadata.uid,
        version=obj.metadata.resource_version,
        number=int(number) if number.isdecimal() else 0,
        queue=str(spec.get("queueName", "")),
        count=_count(pod_set.get("count")),
        minimum=None if minimum is None else _count(minimum),
        priority=int(spec.get("priority") or 0),
        made_from=obj.metadata.annotations.get(MADE_FROM, ""),
        assigned=_count(assignment.get("count")) if reserved and assignment else None,
        flavors=_flavors(assignment),
        reclaimable=reclaimable,
        admitted=_holds(by_type, "Admitted"),
        evicted=str(evicted.get("reason")) if evicted else None,
        evicted_message=str(evicted.get("message", "")),
        finished=str(by_type["Finished"].get("reason")) if _holds(by_type, "Finished") else None,
        finished_at=_time(by_type.get("Finished", {}).get("lastTransitionTime")),
        created_at=obj.metadata.creation_timestamp,
        replaces=replaces or None,
        active=spec.get("active") is not False,
        deleting=obj.metadata.deletion_timestamp is not None,
        waits=str(waits.get("message", "")),
        inadmissible=waits.get("reason") == "Inadmissible",
        pods_ready=None if ready is None else ready.get("status") == "True",
        conditions=conditions,
    )


def _unread(caches: QueueCaches, namespace: str, owned: Collection[Unstructured]) -> str | None:
    """Why nobody knows which Workloads the job has. If their kind is deleted, all of them go first."""
    watched = caches.workloads
    informer = watched.of(namespace) if watched.watches(namespace) else watched.of(EVERYWHERE)
    if informer.has_synced and (owned or informer.gone is None):
        return None
    why = informer.refusal or informer.gone or "the first list has not come"
    return f"Workloads of Kueue cannot be read: {why}"


@dataclass(frozen=True, slots=True)
class _Priority:
    value: int = 0
    reference: Mapping[str, str] | None = None
    refusal: str | None = None


def _priority(caches: QueueCaches, obj: Unstructured, job: JobView) -> _Priority:
    """As Kueue finds it for a Job: by its own class, else by that of the pods, else by the cluster's default."""
    if name := obj.metadata.labels.get(PRIORITY_CLASS):
        return _of_class(caches.workload_classes, WORKLOAD_PRIORITY_CLASSES, name, f"metadata.labels: {PRIORITY_CLASS}")
    if name := (job.spec.template.get("spec") or {}).get("priorityClassName"):
        return _of_class(caches.pod_classes, PRIORITY_CLASSES, str(name), "spec.template.spec.priorityClassName")
    default = next((each for each in caches.pod_classes.list() if each.global_default), None)
    if default is None:
        return _Priority()
    return _Priority(default.value, _reference(PRIORITY_CLASSES, default.metadata.name))


def _of_class(informer: Informer[PriorityClass], resource: Resource[PriorityClass], name: str, field: str) -> _Priority:
    known = informer.get("", name)
    if known is None:
        why = "" if informer.has_synced else f" ({informer.refusal or 'they are not read yet'})"
        return _Priority(refusal=f"{field} names {resource.kind} {name}, which cannot be found{why}")
    return _Priority(known.value, _reference(resource, name))


def _reference(resource: Resource[PriorityClass], name: str) -> Mapping[str, str]:
    return {"group": resource.group, "kind": resource.kind, "name": name}


@dataclass(frozen=True, slots=True)
class _Changes:
    made: PodChanges = field(default_factory=PodChanges)
    obstacle: str | None = None


def _changes(flavors: Informer[Unstructured], workload: Unstructured) -> _Changes:
    """What the admission of this Workload gives to pods, and what keeps them from being made by it."""
    assignment = _assignment(workload.status)
    if assignment.get("topologyAssignment") or assignment.get("delayedTopologyRequest"):
        return _Changes(obstacle="it assigns a topology, which is not supported; use a flavor without topologyName")
    selector: dict[str, str] = {}
    tolerations: list[Mapping[str, Any]] = []
    for name in _flavors(assignment):
        flavor = flavors.get("", name)
        if flavor is None:
            why = "" if flavors.has_synced else f" ({flavors.refusal or 'they are not read yet'})"
            return _Changes(obstacle=f"ResourceFlavor {name} of its quota cannot be found{why}")
        for key, value in sorted((flavor.spec.get("nodeLabels") or {}).items()):
            if selector.setdefault(key, value) != value:
                return _Changes(obstacle=f"its flavors are on other nodes: {key}={selector[key]} and {key}={value}")
        tolerations += _maps(flavor.spec.get("tolerations"))
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    for check in _maps(workload.status.get("admissionChecks")):
        for update in _maps(check.get("podSetUpdates")):
            if update.get("name") == POD_SET:
                labels.update(update.get("labels") or {})
                annotations.update(update.get("annotations") or {})
                selector.update(update.get("nodeSelector") or {})
                tolerations += _maps(update.get("tolerations"))
    return _Changes(PodChanges(labels, annotations, selector, tuple(tolerations)))


def _flavors(assignment: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted({str(flavor) for flavor in (assignment.get("flavors") or {}).values()}))


def _assignment(status: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(_maps((status.get("admission") or {}).get("podSetAssignments")), {})


def _holds(conditions: Mapping[str, Mapping[str, Any]], kind: str) -> bool:
    return conditions.get(kind, {}).get("status") == "True"


def _maps(values: Any) -> Iterator[Mapping[str, Any]]:
    return (value for value in values if isinstance(value, Mapping)) if isinstance(values, list) else iter(())


def _time(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
