"""Turns cached Kubernetes objects into the snapshot for a plan. It reads caches only, and sends nothing.

Ownership is decided here, by UID alone: a pod of an earlier job of the same name, or a foreign pod with our labels, is
not part of the snapshot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

from everstep.contract import labels
from everstep_operator.api.allowlist import checkpoint_url_refusal
from everstep_operator.api.base import SpecError
from everstep_operator.api.parse import parse_spec, parse_status
from everstep_operator.api.types import GangScheduler
from everstep_operator.controller import node_notices, pod_start
from everstep_operator.kube.wire import (
    Condition,
    NetworkPolicy,
    Node,
    Pod,
    PodDisruptionBudget,
    Unstructured,
    controller_uid,
)
from everstep_operator.plan import times
from everstep_operator.plan.render.network_policy import OPEN_PORTS
from everstep_operator.plan.render.pod_group import MADE_OF, least_of
from everstep_operator.plan.snapshot import (
    DisruptionBudgetView,
    Exit,
    JobView,
    NetworkPolicyView,
    NodeHealth,
    NodeView,
    PodGroupView,
    PodPhase,
    WorkerPod,
)
from everstep_operator.worker_pods import (
    disruption_target,
    worker_container,
    worker_exit,
    worker_labels,
    worker_started_at,
)


def job_view(obj: Unstructured, checkpoint_url_prefixes: tuple[str, ...] = ()) -> JobView:
    """The job as types. Raises SpecError naming the field when it cannot be carried out.

    The chart's admission policy refuses a foreign checkpoint URL at the API server; a job that was stored before the
    policy was there is refused here. No prefixes: this installation allows every URL.
    """
    meta = obj.metadata
    spec = parse_spec(obj.spec)
    if spec.checkpoint is not None and checkpoint_url_prefixes:
        refusal = checkpoint_url_refusal(spec.checkpoint.url, meta.namespace, checkpoint_url_prefixes)
        if refusal is not None:
            raise SpecError("spec.checkpoint.url", refusal.removeprefix("spec.checkpoint.url "))
    return JobView(
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        generation=meta.generation,
        resource_version=meta.resource_version,
        spec=spec,
        status=parse_status(obj.status),
        created_at=meta.creation_timestamp or datetime.fromtimestamp(0, UTC),
        deleting=meta.deletion_timestamp is not None,
        migrate=frozenset(filter(None, re.split(r"[\s,]+", meta.annotations.get(labels.MIGRATE, "")))),
    )


def worker_pod(pod: Pod) -> WorkerPod | None:
    """A pod of ours; None when its labels do not say which worker it is."""
    worker = worker_labels(pod)
    if worker is None:
        return None
    conditions = {c.type: c for c in pod.status.conditions}
    ready, since = _ready(pod, conditions)
    disruption = disruption_target(pod)
    return WorkerPod(
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        index=worker.index,
        incarnation=worker.incarnation,
        round=worker.round,
        phase=PodPhase(pod.status.phase) if pod.status.phase in _PHASES else PodPhase.PENDING,
        ready=ready,
        node=pod.spec.node_name or None,
        deleted_at=_deleted_at(pod),
        reason=pod.status.reason or None,
        disruption=(disruption.reason or "DisruptionTarget") if disruption is not None else None,
        waiting=pod_start.stuck(pod),
        unschedulable=_unschedulable(conditions.get("PodScheduled")),
        created_at=pod.metadata.creation_timestamp,
        exit=_exit(pod),
        ready_at=since,
        message=pod.status.message or None,
        disrupted_at=disruption.last_transition_time if disruption is not None else _deadline(pod),
        spec_hash=pod.metadata.labels.get(labels.SPEC_HASH) or None,
        started_at=worker_started_at(pod),
        joining=_is_joining(pod),
        starting=pod_start.starting(pod),
        init_failure=pod_start.init_failure(pod),
        scheduled_at=_scheduled_at(conditions.get("PodScheduled")),
    )


def _ready(pod: Pod, conditions: Mapping[str, Condition]) -> tuple[bool, datetime | None]:
    """Whether the worker container is ready, and since when. A side-car that is not ready makes its pod not Ready. The
    condition counts if it is false for another reason: a readiness gate, or a node that is not ready."""
    condition = conditions.get("Ready")
    since = condition.last_transition_time if condition is not None else None
    worker = worker_container(pod)
    if worker is None or worker.ready == _is_true(condition):
        return _is_true(condition), since
    all_ready = conditions.get("ContainersReady")
    if worker.ready and (all_ready is None or _is_true(all_ready)):
        return False, since
    running = worker.state.running
    return worker.ready, running.started_at if running is not None else since


def _is_joining(pod: Pod) -> bool:
    worker = worker_container(pod)
    if worker is None or worker_exit(pod) is not None:
        return False
    return worker.state.running is not None and worker.started is False


_PHASES = frozenset(PodPhase)


def node_view(node: Node) -> NodeView:
    ready = next((c for c in node.status.conditions if c.type == "Ready"), None)
    if ready is None:
        return NodeView(node.metadata.name, NodeHealth.SILENT)
    health = {"True": NodeHealth.READY, "False": NodeHealth.NOT_READY}.get(ready.status, NodeHealth.SILENT)
    return NodeView(
        node.metadata.name, health, ready.last_transition_time, ready.reason[:100], node_notices.leaving(node)
    )


def unread_node(name: str) -> NodeView:
    """A node that this operator may not read. Nothing is known against it, so no worker is lost or moved because of it:
    Kubernetes itself deletes the pods of a node that is silent, after their tolerations."""
    return NodeView(name, NodeHealth.READY)


def disruption_budget_view(budget: PodDisruptionBudget, job_uid: str) -> DisruptionBudgetView | None:
    """The view of a disruption budget; None if it is not this job's."""
    if controller_uid(budget.metadata) != job_uid:
        return None
    least = budget.spec.min_available
    return DisruptionBudgetView(budget.metadata.uid, least if isinstance(least, int) else None)


def network_policy_view(policy: NetworkPolicy | None, job_uid: str) -> NetworkPolicyView | None:
    """The view of a network policy; None if it is not this job's."""
    if policy is None or controller_uid(policy.metadata) != job_uid:
        return None
    return NetworkPolicyView(policy.metadata.uid, policy.metadata.annotations.get(OPEN_PORTS))


def pod_group_view(group: Unstructured | None, job_uid: str, scheduler: GangScheduler) -> PodGroupView | None:
    """The view of a scheduler's group; None if it is not this job's."""
    if group is None or controller_uid(group.metadata) != job_uid:
        return None
    meta = group.metadata
    least, made_of = least_of(scheduler, group.spec), meta.annotations.get(MADE_OF)
    return PodGroupView(scheduler, meta.uid, least, made_of, deleting=meta.deletion_timestamp is not None)


def _is_true(condition: Condition | None) -> bool:
    return condition is not None and condition.status == "True"


def _deleted_at(pod: Pod) -> datetime | None:
    """When the deletion was requested: deletionTimestamp is later than that by the grace period."""
    at = pod.metadata.deletion_timestamp
    return None if at is None else times.after(at, -(pod.metadata.deletion_grace_period_seconds or 0))


def _deadline(pod: Pod) -> datetime | None:
    """When the template's own `activeDeadlineSeconds` was over, if the kubelet ended the pod by it. A worker that had
    ended before, while a side-car still ran, was not ended by it."""
    seconds, start = pod.spec.active_deadline_seconds, pod.status.start_time
    if pod.status.reason != "DeadlineExceeded" or seconds is None or start is None:
        return None
    return times.after(start, seconds)


def _scheduled_at(condition: Condition | None) -> datetime | None:
    return condition.last_transition_time if condition is not None and _is_true(condition) else None


def _unschedulable(condition: Condition | None) -> str | None:
    if condition is None or condition.status != "False" or condition.reason != "Unschedulable":
        return None
    return condition.message[:300]


def _exit(pod: Pod) -> Exit | None:
    ended = worker_exit(pod)
    if ended is None:
        return None
    return Exit(ended.exit_code, ended.reason or None, ended.message or None, ended.finished_at)
