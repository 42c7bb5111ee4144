"""Marks nodes that have fallen silent, as kube-controller-manager's node lifecycle controller does.

Time counts from when this controller saw a Lease change, on its own clock. A controller that was itself stopped (a
stopped process, a sleeping laptop) has missed heartbeats, so it starts to count again. Invariant: a node is marked only
for a silence that this controller watched from beginning to end. Pods stay on a lost node: the operator decides about
them.
"""

from __future__ import annotations

import logging
from typing import Any

from everstep_local.nodes.node import NODES, NodeTiming
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import KubeError
from everstep_operator.kube.wire import Lease, Unstructured, rfc3339
from everstep_operator.runtime.clock import Clock
from everstep_operator.runtime.informer import Informer

log = logging.getLogger(__name__)

UNREACHABLE = "node.kubernetes.io/unreachable"
EFFECTS = ("NoSchedule", "NoExecute")


class NodeController:
    def __init__(
        self,
        client: KubeClient,
        nodes: Informer[Unstructured],
        leases: Informer[Lease],
        clock: Clock,
        timing: NodeTiming,
    ) -> None:
        self._client = client
        self._nodes = nodes
        self._leases = leases
        self._clock = clock
        self._timing = timing
        self._seen: dict[str, tuple[str, float]] = {}  # the Lease's resource version, and when it was first seen

    async def run(self) -> None:
        await self._nodes.wait_synced()
        await self._leases.wait_synced()
        period = self._timing.heartbeat / 2
        last = self._clock.monotonic()
        while True:
            await self._clock.sleep(period)
            now = self._clock.monotonic()
            if now - last > 2 * period + 0.1:
                self._seen = {name: (version, now) for name, (version, _) in self._seen.items()}
            last = now
            for node in self._nodes.list():
                try:
                    await self._judge(node, now)
                except KubeError as e:
                    log.warning("node not judged", extra={"node": node.metadata.name, "error": str(e)})

    async def _judge(self, node: Unstructured, now: float) -> None:
        name = node.metadata.name
        lease = next((candidate for candidate in self._leases.list() if candidate.metadata.name == name), None)
        version = lease.metadata.resource_version if lease is not None else ""
        if self._seen.get(name, ("", 0.0))[0] != version or name not in self._seen:
            self._seen[name] = (version, now)
        silent = now - self._seen[name][1] > self._timing.grace
        ready = next((c for c in node.status.get("conditions") or () if c.get("type") == "Ready"), None)
        status = ready.get("status") if ready is not None else None
        if silent and status != "Unknown" and ready is not None:
            await self._mark_unknown(node, ready)
        elif not silent and status == "True":
            await self._taint(node, tainted=False)
        elif status == "Unknown":
            await self._taint(node, tainted=True)

    async def _mark_unknown(self, node: Unstructured, ready: dict[str, Any]) -> None:
        condition = {
            **ready,
            "status": "Unknown",
            "reason": "NodeStatusUnknown",
            "message": "Kubelet stopped posting node status.",
            "lastTransitionTime": rfc3339(self._clock.now()),
        }
        others = [c for c in node.status.get("conditions") or () if c.get("type") != "Ready"]
        await self._client.patch_status(
            NODES,
            None,
            node.metadata.name,
            {"conditions": [*others, condition]},
            resource_version=node.metadata.resource_version,
        )
        log.info("node is not ready", extra={"node": node.metadata.name})

    async def _taint(self, node: Unstructured, *, tainted: bool) -> None:
        taints = list(node.spec.get("taints") or ())
        others = [t for t in taints if t.get("key") != UNREACHABLE]
        if tainted == (len(others) < len(taints)):
            return
        now = rfc3339(self._clock.now())
        added = [{"key": UNREACHABLE, "effect": effect, "timeAdded": now} for effect in EFFECTS] if tainted else []
        await self._client.merge_patch(
            NODES,
            None,
            node.metadata.name,
            {"spec": {"taints": [*others, *added] or None}},
            resource_version=node.metadata.resource_version,
        )
