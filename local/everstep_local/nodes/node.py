"""One simulated node: its object, its heartbeat and its kubelet. It can be killed and started again.

Invariant: a killed node writes nothing more, and none of its processes runs any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep_local.kubelet.kubelet import Kubelet
from everstep_local.kubelet.sources import HOST_IP
from everstep_local.kubelet.starter import Host
from everstep_operator.kube.backoff import Backoff
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import AlreadyExists, Conflict, KubeError, NotFound, Operation
from everstep_operator.kube.resources import LEASES, Resource
from everstep_operator.kube.wire import Unstructured, micro_time, rfc3339
from everstep_operator.runtime.clock import Clock, cancel

log = logging.getLogger(__name__)

NODES = Resource("", "v1", "nodes", "Node", Unstructured, namespaced=False)
LEASE_NAMESPACE = "kube-node-lease"
BACKOFF = Backoff(base=0.1, cap=2.0)


@dataclass(frozen=True, slots=True)
class NodeTiming:
    """Times in seconds. A node becomes NotReady after `grace` without a heartbeat. A cluster waits 40 s, because its
    network may be slow. Here only a killed node is silent, and a person is waiting for the effect."""

    heartbeat: float = 0.5
    grace: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < 2 * self.heartbeat < self.grace:
            raise ValueError(f"a node needs two heartbeats within its grace, got {self}")


class Node:
    """A node. `run` it in a task. It is on from the start."""

    def __init__(self, host: Host, kubelet: Kubelet, capacity: Mapping[str, str], timing: NodeTiming) -> None:
        self.name = kubelet.name
        self.kubelet = kubelet
        self._host = host
        self._capacity = dict(capacity)
        self._timing = timing
        self._power = asyncio.Event()
        self._power.set()
        self._life: asyncio.Task[None] | None = None
        self._off = asyncio.Event()

    @property
    def on(self) -> bool:
        return self._power.is_set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._power.wait()
            self._off.clear()
            self._life = asyncio.create_task(self._live(), name=f"node {self.name}")
            try:
                await asyncio.wait((self._life,))
            finally:
                await cancel(self._life)
                self._off.set()
            if not self._life.cancelled() and (error := self._life.exception()) is not None:
                raise error

    def kill(self) -> None:
        """Kill the node as if its plug was pulled: all processes get SIGKILL now, and nothing is written."""
        self._power.clear()
        self.kubelet.power_off()
        if self._life is not None:
            self._life.cancel()

    async def wait_off(self) -> None:
        """Wait until no process of a killed node is left."""
        await self._off.wait()

    def start(self) -> None:
        """Start the node again."""
        self._power.set()

    async def _live(self) -> None:
        kubelet = asyncio.create_task(self.kubelet.run(), name=f"kubelet {self.name}")
        failures = 0
        try:
            while True:
                try:
                    await post_ready(self._host.client, self.name, self._capacity, self._host.clock)
                    await self._beat()
                    failures = 0
                    pause = self._timing.heartbeat
                except KubeError as e:
                    log.warning("node status not written", extra={"node": self.name, "error": str(e)})
                    pause = BACKOFF.delay(failures, self._host.rng())
                    failures += 1
                await self._host.clock.sleep(pause)
                if kubelet.done():
                    kubelet.result()
        finally:
            await cancel(kubelet)

    async def _beat(self) -> None:
        """Renew the node's Lease, which shows that the node is alive."""
        spec = {
            "holderIdentity": self.name,
            "leaseDurationSeconds": max(1, round(self._timing.grace)),
            "renewTime": micro_time(self._host.clock.now()),
        }
        try:
            await self._host.client.merge_patch(LEASES, LEASE_NAMESPACE, self.name, {"spec": spec})
        except NotFound:
            body = {
                "apiVersion": LEASES.api_version,
                "kind": LEASES.kind,
                "metadata": {"name": self.name, "namespace": LEASE_NAMESPACE},
                "spec": spec,
            }
            await self._host.client.create(LEASES, LEASE_NAMESPACE, body)


async def post_ready(client: KubeClient, name: str, capacity: Mapping[str, str], clock: Clock) -> None:
    """Make the Node object say Ready, if it does not. Raises KubeError."""
    try:
        node = await client.get(NODES, None, name)
    except NotFound:
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": {}}
        try:
            node = await client.create(NODES, None, body)
        except AlreadyExists as e:
            raise Conflict(
                "created by another at the same time", operation=Operation("create", "nodes", name=name)
            ) from e
    conditions = node.status.get("conditions") or ()
    ready: Mapping[str, Any] = next((c for c in conditions if c.get("type") == "Ready"), {})
    if ready.get("status") == "True" and node.status.get("capacity") == capacity:
        return
    now = rfc3339(clock.now())
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "message": "kubelet is posting ready status",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now if ready.get("status") != "True" else ready.get("lastTransitionTime", now),
    }
    status: dict[str, Any] = {
        "capacity": dict(capacity),
        "allocatable": dict(capacity),
        "conditions": [*(c for c in conditions if c.get("type") != "Ready"), condition],
        "addresses": [{"type": "InternalIP", "address": HOST_IP}, {"type": "Hostname", "address": name}],
    }
    await client.patch_status(NODES, None, name, status, resource_version=node.metadata.resource_version)
