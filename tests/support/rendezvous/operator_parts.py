"""What every operator over an in-memory cluster is made of, in tests and benchmarks: a CRD, pods, and its start.

What plans is left out: whoever starts one is the planner, and makes the pods.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from everstep.contract import labels
from everstep_operator.api.crd import crd
from everstep_operator.kube.wire import Unstructured
from everstep_operator.main import Operator

TEMPLATE = {"spec": {"containers": [{"name": "worker", "image": "train:1", "command": ["torchrun"]}]}}


def lenient_crd() -> dict[str, Any]:
    """The CRD without its rules: the tests' jobs need no planner, so what it does not do yet does not matter."""
    definition = copy.deepcopy(crd())

    def strip(node: Any) -> None:
        if isinstance(node, dict):
            node.pop("x-kubernetes-validations", None)
            for value in node.values():
                strip(value)
        elif isinstance(node, list):
            for value in node:
                strip(value)

    strip(definition)
    return definition


def pod_body(
    job: Unstructured, name: str, index: int, incarnation: int = 0, node: str = "node-1", round_: int = 0
) -> dict[str, Any]:
    """A worker's pod as the planner makes it; of round 0 is one whose agent joins rounds."""
    owner = {
        "apiVersion": labels.API_VERSION, "kind": labels.KIND, "name": job.metadata.name, "uid": job.metadata.uid,
        "controller": True,
    }  # fmt: skip
    found = {
        labels.JOB: job.metadata.name, labels.JOB_UID: job.metadata.uid, labels.MANAGED_BY: labels.MANAGER,
        labels.WORKER_INDEX: str(index), labels.INCARNATION: str(incarnation), labels.ROUND: str(round_),
    }  # fmt: skip
    meta = {"name": name, "labels": found, "ownerReferences": [owner]}
    return {"metadata": meta, "spec": {**TEMPLATE["spec"], "nodeName": node}}


async def start(operator: Operator, group: asyncio.TaskGroup) -> None:
    """Everything but its server, which listens already, and its planner. Returns with full caches."""
    group.create_task(operator.caches.run())
    await operator.caches.wait_synced()
    group.create_task(operator.elector.run())
    group.create_task(operator.leader_probe.run())
