"""What a node says of its end: the reason for which its workers are moved."""

from __future__ import annotations

import pytest

from everstep.contract import labels
from everstep_operator.controller import node_notices
from everstep_operator.controller.observe import node_view
from everstep_operator.kube.wire import Condition, Node, NodeSpec, NodeStatus, ObjectMeta, Taint


def node(
    *taints: tuple[str, str],
    conditions: tuple[tuple[str, str], ...] = (),
    leave: str | None = None,
) -> Node:
    return Node(
        metadata=ObjectMeta(name="n1", annotations={} if leave is None else {labels.LEAVE: leave}),
        spec=NodeSpec(
            taints=tuple(Taint(key=key, value=value) for key, value in taints),
        ),
        status=NodeStatus(
            conditions=tuple(Condition(type=type_, status=status) for type_, status in (("Ready", "True"), *conditions))
        ),
    )


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (node(), None),
        (node(("ToBeDeletedByClusterAutoscaler", "1796050245")), "is removed by the cluster's autoscaler"),
        (node(("karpenter.sh/disrupted", "")), "is removed by Karpenter"),
        (node(("aws-node-termination-handler/spot-itn", "x")), "is a spot node that is taken back"),
        (node(("everstep.dev/leave", "rack-4")), "is marked to leave (rack-4)"),
        (node(("everstep.dev/leave", "")), "is marked to leave"),
        (node(leave="rack 4\nis moved " + "x" * 200), "is marked to leave (rack 4 is moved " + "x" * 84 + ")"),
        (node(conditions=(("VMEventScheduled", "True"),)), "has a maintenance event"),
        (node(conditions=(("VMEventScheduled", "False"),)), None),
        (node(("node.kubernetes.io/unschedulable", "")), None),  # it is cordoned: what runs there may stay
        # Pressure, failures, and nodes that are kept for others: nobody says that the node is about to go.
        (node(("node.kubernetes.io/memory-pressure", "")), None),
        (node(("node.kubernetes.io/unreachable", "")), None),
        (node(("pool", "spot")), None),
        (node(("DeletionCandidateOfClusterAutoscaler", "1")), None),
    ],
)
def test_node_says_that_its_pods_have_to_leave(seen: Node, why: str | None) -> None:
    assert node_notices.leaving(seen) == node_view(seen).leaving == why
