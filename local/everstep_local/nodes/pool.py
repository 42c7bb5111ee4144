"""The simulated nodes of this machine, with a scheduler and a node controller, as in a cluster.

One watch of pods serves all nodes. Invariant: when `run` has returned, no process of any pod is left and the folder is
gone. If this process dies, the guards end the processes, and the next run removes the folder.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from everstep_local.kubelet.addresses import Addresses
from everstep_local.kubelet.kubelet import Kubelet
from everstep_local.kubelet.pod_run import PodRun
from everstep_local.kubelet.processes.guard import descendants
from everstep_local.kubelet.processes.log import LogLine, follow, read
from everstep_local.kubelet.processes.log import tail as last_lines
from everstep_local.kubelet.processes.root import Root
from everstep_local.kubelet.sources import PODS
from everstep_local.kubelet.starter import LOG_BYTES, Host
from everstep_local.kubelet.volumes import TokenIssuer
from everstep_local.nodes.controller import NodeController
from everstep_local.nodes.node import BACKOFF, LEASE_NAMESPACE, NODES, Node, NodeTiming
from everstep_local.nodes.resources import quantity
from everstep_local.nodes.scheduler import Scheduler
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import AlreadyExists, KubeError
from everstep_operator.kube.resources import LEASES, Resource
from everstep_operator.kube.wire import Lease, Unstructured
from everstep_operator.runtime.cache import Deleted, Delta
from everstep_operator.runtime.clock import Clock
from everstep_operator.runtime.informer import Informer
from everstep_operator.runtime.randomness import Random

NAMESPACES = Resource("", "v1", "namespaces", "Namespace", Unstructured, namespaced=False)
PODS_PER_NODE = 16
TIMING = NodeTiming()


class LocalNodes:
    """Runs the pods of `client` as processes. All writes go through `client` too.

    `capacity`: that of each node, in quantities; cpu and memory that are missing in it are unbounded. `temporary`:
    where the folder for all pods is made (None: the system's). `issue_token` makes projected service-account tokens.
    Raises ValueError for an invalid quantity.
    """

    def __init__(
        self,
        client: KubeClient,
        issue_token: TokenIssuer,
        *,
        clock: Clock,
        names: Sequence[str] = ("node-1", "node-2"),
        capacity: Mapping[str, str] | None = None,
        timing: NodeTiming = TIMING,
        workdir: Path | None = None,
        pass_env: frozenset[str] = frozenset(),
        log_bytes: int = LOG_BYTES,
        claims: Path | None = None,
        temporary: Path | None = None,
        rng: Random = random.random,
    ) -> None:
        self._client = client
        self._clock = clock
        self._addresses = Addresses()
        self._host = Host(client, issue_token, clock, rng, self._addresses, workdir, pass_env, log_bytes, claims)
        have = {"pods": str(PODS_PER_NODE), **(capacity or {})}
        for resource, amount in have.items():
            quantity(amount, resource)
        self._root = Root(temporary)
        self._nodes = {
            name: Node(self._host, Kubelet(name, self._host, self._root.path / name), have, timing) for name in names
        }
        self._pods = Informer(client, PODS, clock=clock, rng=rng)
        self._objects = Informer(client, NODES, clock=clock, rng=rng)
        self._leases: Informer[Lease] = Informer(client, LEASES, clock=clock, rng=rng, namespace=LEASE_NAMESPACE)
        self._scheduler = Scheduler(client, self._pods, self._objects, clock)
        self._controller = NodeController(client, self._objects, self._leases, clock, timing)
        self._pods.add_handler(self._pod)
        self._objects.add_handler(lambda _: self._scheduler.nudge())

    @property
    def folder(self) -> Path:
        """The folder of all files of all pods."""
        return self._root.path

    @property
    def addresses(self) -> Addresses:
        return self._addresses

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await self._make_namespace()
            async with asyncio.TaskGroup() as group:
                for informer in (self._pods, self._objects, self._leases):
                    group.create_task(informer.run())
                for node in self._nodes.values():
                    group.create_task(node.run())
                group.create_task(self._scheduler.run())
                group.create_task(self._controller.run())
        finally:
            self._root.close()

    def close(self) -> None:
        """Remove the folder; `run` does so at its end."""
        self._root.close()

    def kill(self, node: str) -> None:
        """Kill a node. Raises KeyError."""
        self._nodes[node].kill()

    async def wait_off(self, node: str) -> None:
        """Until nothing is left of a killed node."""
        await self._nodes[node].wait_off()

    def start(self, node: str) -> None:
        """Start a killed node again. Raises KeyError."""
        self._nodes[node].start()

    def pids(self, namespace: str, pod: str) -> dict[str, int]:
        """The main process of each running container of a pod, to be watched or killed. Raises KeyError."""
        return self._run_of(namespace, pod).pids()

    def processes(self, namespace: str, pod: str) -> tuple[int, ...]:
        """Every process of a pod that runs, children after their parents. Raises KeyError."""
        return tuple(p for main in self.pids(namespace, pod).values() for p in (main, *descendants(main)))

    async def logs(
        self, namespace: str, pod: str, *, container: str | None = None, tail: int | None = None, follow_: bool = False
    ) -> AsyncIterator[LogLine]:
        """The output of a container: all, or the last `tail` lines; with `follow_` until it has ended.

        Raises KeyError for a pod or container that is not here.
        """
        run = self._run_of(namespace, pod)
        path = run.log_path(container)
        if not follow_:
            for line in read(path) if tail is None else last_lines(path, tail):
                yield line
            return
        async for line in follow(path, self._clock, lambda: run.ended, tail):
            yield line

    def _run_of(self, namespace: str, pod: str) -> PodRun:
        cached = self._pods.get(namespace, pod)
        if cached is not None:
            for node in self._nodes.values():
                if (run := node.kubelet.find(cached.metadata.uid)) is not None:
                    return run
        raise KeyError(f"pod {namespace}/{pod} does not run on this machine")

    def _pod(self, delta: Delta[Unstructured]) -> None:
        self._scheduler.nudge()
        pod = delta.object
        node = self._nodes.get(str(pod.spec.get("nodeName") or ""))
        if node is None:
            return
        if isinstance(delta, Deleted):
            node.kubelet.forget(pod.metadata.uid)
        else:
            node.kubelet.see(pod)

    async def _make_namespace(self) -> None:
        """Make the namespace, which a real cluster has from the start."""
        failures = 0
        while True:
            try:
                await self._client.create(
                    NAMESPACES,
                    None,
                    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": LEASE_NAMESPACE}},
                )
                return
            except AlreadyExists:
                return
            except KubeError:
                await self._clock.sleep(BACKOFF.delay(failures, self._host.rng()))
                failures += 1
