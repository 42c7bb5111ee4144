"""Reads from a pod which job controls it, which worker it is, and whether it has ended. Pure.

It is the only reader of these labels. Invariant: labels with invalid values, which somebody edited, name no worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from everstep.contract import labels
from everstep_operator.kube.wire import (
    Condition,
    ContainerStatus,
    ContainerTerminated,
    KubeObject,
    Pod,
)

Key: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class WorkerLabels:
    index: int
    incarnation: int
    round: int | None  # None: the pod belongs to no round, because its agent joins rounds


def owner_key(obj: KubeObject) -> Key | None:
    """Namespace and name of the job that controls this object; None if no job does."""
    for owner in obj.metadata.owner_references:
        if owner.controller and owner.kind == labels.KIND and owner.api_version == labels.API_VERSION:
            return (obj.metadata.namespace, owner.name)
    return None


def worker_labels(pod: Pod) -> WorkerLabels | None:
    """The worker that the labels name; None if they name none."""
    pod_labels = pod.metadata.labels
    try:
        index, incarnation = int(pod_labels[labels.WORKER_INDEX]), int(pod_labels[labels.INCARNATION])
        return WorkerLabels(index, incarnation, int(pod_labels[labels.ROUND]) if labels.ROUND in pod_labels else None)
    except (KeyError, ValueError):
        return None


def worker_container(pod: Pod) -> ContainerStatus | None:
    """The status of the container that decides what becomes of the pod's worker; None if the kubelet gave none."""
    return next((s for s in pod.status.container_statuses if s.name == labels.WORKER_CONTAINER), None)


# The end of a container that the kubelet did not see, because the node or its runtime restarted.
_NOT_SEEN = ContainerTerminated(exit_code=137, reason="ContainerStatusUnknown")


def worker_exit(pod: Pod) -> ContainerTerminated | None:
    """How the worker's container ended for the first time; None while it has not.

    Restarts are off. Where a runtime has lost the container all the same, the kubelet shows it as waiting, or starts it
    again. Its end is then in `lastState`, or only in the number of restarts. What it does since is no work of the
    worker: its peers and its round are gone.
    """
    status = worker_container(pod)
    if status is None:
        return None
    ended = status.last_state.terminated or status.state.terminated
    return _NOT_SEEN if ended is None and status.restart_count > 0 else ended


def disruption_target(pod: Pod) -> Condition | None:
    """The condition by which the pod is about to be deleted; None if it is not true."""
    return next((c for c in pod.status.conditions if c.type == "DisruptionTarget" and c.status == "True"), None)


def stop_was_requested(pod: Pod) -> bool:
    """Whether the pod is being deleted, or is about to be: a program may end because of that.

    `WorkerPod.stop_was_requested` says the same of a snapshot. That includes a pod that the kubelet ended.
    """
    by_kubelet = pod.status.phase == "Failed" and pod.status.reason not in ("", "NodeLost")
    return pod.metadata.deletion_timestamp is not None or disruption_target(pod) is not None or by_kubelet


def worker_started_at(pod: Pod) -> datetime | None:
    """When the worker's container began to run; None if it has not, or the kubelet does not know."""
    status = worker_container(pod)
    if status is None:
        return None
    ran = worker_exit(pod) or status.state.running
    return ran.started_at if ran is not None else None


def has_started(pod: Pod) -> bool:
    """Whether the worker's container has begun to run. An end that the kubelet did not see has no beginning."""
    return worker_started_at(pod) is not None or worker_exit(pod) is not None


def has_ended(pod: Pod) -> bool:
    """Whether the worker has ended; side-cars of its pod may still run."""
    if pod.status.phase in ("Succeeded", "Failed"):
        return True
    return worker_labels(pod) is not None and worker_exit(pod) is not None
