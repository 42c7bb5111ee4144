"""Decides whether a pod's node has taken its worker away. Reasons: ADR 0041.

Three facts differ. A node object that was deleted is gone. A node of which Kubernetes says `Unknown` is silent: its
kubelet has not answered for the whole grace period of the node controller. A node of which the kubelet itself says
`False` is alive, and so, most likely, are its containers: a network plugin was restarted, or the runtime is slow.

A worker that answers is never lost because of its node's state. Invariant: each wait has an end, and `until_lost` gives
the time of the next check, because no event marks the end of a wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from everstep_operator.api.recovery import MAX_NODE_GRACE
from everstep_operator.plan import times
from everstep_operator.plan.snapshot import NodeHealth, NodeView, Snapshot, WorkerPod

NOT_READY_GRACE = timedelta(seconds=60)
# Pods and nodes are cached independently: a node that has just joined may not be seen yet.
NODE_SEEN_WITHIN = timedelta(seconds=30)
# Under c10d a step needs all ranks, so a report that is not older than this shows that all workers live.
STEPPED_WITHIN = timedelta(seconds=5)
LOOK = timedelta(seconds=2)  # between two checks of a worker on a node that is not ready
_TAINTS = {
    NodeHealth.NOT_READY: "node.kubernetes.io/not-ready",
    NodeHealth.SILENT: "node.kubernetes.io/unreachable",
}


def why_lost(snapshot: Snapshot, pod: WorkerPod) -> str | None:
    """What happened to the pod's node, if its worker is lost by it."""
    if pod.node is None:
        return None
    node = snapshot.nodes.get(pod.node)
    if node is None:
        return None if _may_be_unseen(snapshot, pod) else f"node {pod.node} is gone"
    if node.ready or _is_alive(snapshot, pod) or _left(snapshot, node) > timedelta(0):
        return None
    return f"node {pod.node} is not ready" + ("" if node.health is NodeHealth.SILENT else f" ({node.reason})")


def is_lost(snapshot: Snapshot, pod: WorkerPod) -> bool:
    return why_lost(snapshot, pod) is not None


def came_late(pod: WorkerPod, node: NodeView) -> bool:
    """Whether the pod came to its node when that was out already. The template names the node, or tolerates all taints,
    so the next pod may come there too."""
    came = pod.scheduled_at or pod.created_at
    return not node.ready and (node.changed_at is None or came is None or came >= node.changed_at)


def until_lost(snapshot: Snapshot, pod: WorkerPod) -> timedelta | None:
    """When to look again at a worker whose node is not ready, or not seen yet; None if nothing has to be looked at."""
    if pod.node is None or pod.finished:
        return None
    node = snapshot.nodes.get(pod.node)
    if node is None:
        return LOOK if _may_be_unseen(snapshot, pod) else None
    if node.ready:
        return None
    left = _left(snapshot, node)
    return min(left, LOOK) if left > timedelta(0) else LOOK


def grace(snapshot: Snapshot, health: NodeHealth) -> timedelta:
    """How long a worker is left on a node in this state."""
    chosen = snapshot.job.spec.recovery.node_grace_seconds
    if chosen is None:
        chosen = _tolerated(snapshot.job.spec.template, _TAINTS[health])
    if chosen is not None:
        return timedelta(seconds=chosen)
    return NOT_READY_GRACE if health is NodeHealth.NOT_READY else timedelta(0)


def _left(snapshot: Snapshot, node: NodeView) -> timedelta:
    since = node.changed_at
    if since is None or not times.may_be(since, snapshot.now):
        return timedelta(0)
    return min(since, snapshot.now) + grace(snapshot, node.health) - snapshot.now


def _may_be_unseen(snapshot: Snapshot, pod: WorkerPod) -> bool:
    """Whether the pod came to its node so lately that the node itself may not be seen yet. A pod that waits for an
    autoscaler is old by then."""
    since = pod.scheduled_at or pod.created_at
    return since is not None and times.may_be(since, snapshot.now) and snapshot.now - since <= NODE_SEEN_WITHIN


def _is_alive(snapshot: Snapshot, pod: WorkerPod) -> bool:
    if pod.uid in snapshot.answering:
        return True
    seen = snapshot.progress
    is_of_world = pod.round is not None and pod.round == seen.round
    return is_of_world and seen.trained_at is not None and _is_fresh(seen.updated_at, snapshot.now)


def _is_fresh(at: datetime | None, now: datetime) -> bool:
    return at is not None and times.may_be(at, now) and now - at <= STEPPED_WITHIN


def _tolerated(template: Mapping[str, Any], taint: str) -> int | None:
    """The `tolerationSeconds` that the template itself has for a taint. (Every pod has some: the API server adds 300.)

    A toleration without seconds, or of every taint, is about where a pod may be scheduled. Taken literally, it would
    keep the workers of a dead node for ever.
    """
    spec = template.get("spec")
    listed = spec.get("tolerations") if isinstance(spec, Mapping) else None
    for toleration in listed if isinstance(listed, list) else ():
        if not isinstance(toleration, Mapping) or toleration.get("key") != taint:
            continue
        seconds = toleration.get("tolerationSeconds")
        if toleration.get("effect") in (None, "", "NoExecute") and isinstance(seconds, int):
            return max(0, min(seconds, MAX_NODE_GRACE))
    return None
