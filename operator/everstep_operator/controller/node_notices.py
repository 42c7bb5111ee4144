"""Reads from a node whether its pods have to leave soon, and why. Pure.

There is no one field for that: autoscalers, and programs that hear of a cloud's notice, set taints of their own. A
cordoned node gets no new pods, and those that it has may stay: people cordon a node to look at what runs there. A node
that is not ready is something else: its workers may be lost already (`plan.state.node_loss`).
"""

from __future__ import annotations

from everstep.contract import labels
from everstep_operator.kube.wire import Node

MAX_WHY = 100  # characters of a text that somebody wrote into the node
# Taints that announce the end of a node, by the programs that set them.
TAINTS = {
    "ToBeDeletedByClusterAutoscaler": "is removed by the cluster's autoscaler",
    "karpenter.sh/disrupted": "is removed by Karpenter",
    "karpenter.sh/disruption": "is removed by Karpenter",  # before its version 1
    "aws-node-termination-handler/spot-itn": "is a spot node that is taken back",
    "aws-node-termination-handler/rebalance-recommendation": "is a spot node that may be taken back",
    "aws-node-termination-handler/scheduled-maintenance": "has a maintenance event",
    "aws-node-termination-handler/asg-lifecycle-termination": "is removed by its group's scaling",
    "cloud.google.com/impending-node-termination": "is taken back by the cloud",
    "node.cloudprovider.kubernetes.io/shutdown": "is shut down by the cloud",
}
# Conditions that do so while they are true.
CONDITIONS = {"VMEventScheduled": "has a maintenance event"}


def leaving(node: Node) -> str | None:
    """Why the node's pods have to leave, as the end of a sentence about it; None if they may stay."""
    if (why := node.metadata.annotations.get(labels.LEAVE)) is not None:
        return _marked(why)
    for taint in node.spec.taints:
        if taint.key == labels.LEAVE:
            return _marked(taint.value)
        if taint.key in TAINTS:
            return TAINTS[taint.key]
    for condition in node.status.conditions:
        if condition.status == "True" and condition.type in CONDITIONS:
            return CONDITIONS[condition.type]
    return None


def _marked(why: str) -> str:
    text = " ".join(why.split())[:MAX_WHY]
    return f"is marked to leave ({text})" if text else "is marked to leave"
