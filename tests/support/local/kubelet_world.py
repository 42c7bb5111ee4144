"""A machine with simulated nodes, and what a test does to it. Real processes, real time; waits are for conditions."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from everstep_local.apiserver.cluster import MemoryCluster
from everstep_local.kubelet.sources import CONFIG_MAPS, PODS, SECRETS
from everstep_local.nodes.node import NODES, NodeTiming
from everstep_local.nodes.pool import LocalNodes
from everstep_operator.kube.errors import NotFound
from everstep_operator.kube.wire import Unstructured
from everstep_operator.runtime.clock import SystemClock, cancel
from support.processes.descriptors import opened

NAMESPACE = "default"
QUICK = NodeTiming(heartbeat=0.1, grace=0.6)


def remains(folder: Path) -> set[str]:
    """What a run could leave behind: child processes, open files and folders."""
    children = {f"process {child}" for child in children_of(os.getpid())}
    files = {f"{descriptor} -> {path}" for descriptor, path in opened().items()}
    return children | files | {f"folder {path.name}" for path in folder.glob("*everstep-*")}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(parent: int) -> list[int]:
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if parent_of(pid) == parent:
                found.append(pid)
    return found


def command_of(pid: int) -> str:
    """The command line; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and only not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Machine:
    def __init__(self, cluster: MemoryCluster, nodes: LocalNodes) -> None:
        self.cluster = cluster
        self.nodes = nodes
        self.client = cluster.client()

    async def create(
        self, name: str, *command: str, spec: dict[str, Any] | None = None, **container: Any
    ) -> Unstructured:
        """A pod of one container, `worker`, that runs `command`; `spec` and `container` add fields."""
        worker = {"name": "worker", "image": "none", "command": list(command), **container}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": "test"}, "annotations": {"note": "said"}},
            "spec": {"restartPolicy": "Never", "containers": [worker], **(spec or {})},
        }
        return await self.client.create(PODS, NAMESPACE, body)

    async def secret(self, name: str, **data: str) -> None:
        encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
        await self.client.create(SECRETS, NAMESPACE, {"metadata": {"name": name}, "data": encoded})

    async def config_map(self, name: str, **data: str) -> None:
        await self.client.create(CONFIG_MAPS, NAMESPACE, {"metadata": {"name": name}, "data": data})

    async def delete(self, name: str, grace: int | None = None) -> None:
        await self.client.delete(PODS, NAMESPACE, name, grace_seconds=grace)

    async def pod(self, name: str) -> Unstructured | None:
        try:
            return await self.client.get(PODS, NAMESPACE, name)
        except NotFound:
            return None

    async def state(self, name: str, container: str = "worker") -> dict[str, Any]:
        """The container's state, empty if the kubelet has reported none."""
        pod = await self.pod(name)
        statuses = (pod.status if pod is not None else {}).get("containerStatuses") or ()
        return next((dict(s["state"]) for s in statuses if s["name"] == container), {})

    async def until(self, what: str, holds: Callable[[], Awaitable[Any]], seconds: float = 20) -> Any:
        """The first true value of `holds`."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not (value := await holds()):
            assert asyncio.get_running_loop().time() < deadline, f"not within {seconds:g} s: {what}"
            await asyncio.sleep(0.02)
        return value

    async def until_phase(self, name: str, *phases: str) -> Unstructured:
        async def reached() -> Unstructured | None:
            pod = await self.pod(name)
            return pod if pod is not None and pod.status.get("phase") in phases else None

        found: Unstructured = await self.until(f"{name} is {' or '.join(phases)}", reached)
        return found

    async def until_over(self, name: str) -> dict[str, Any]:
        """How the container ended."""
        await self.until_phase(name, "Succeeded", "Failed")
        ended: dict[str, Any] = (await self.state(name))["terminated"]
        return ended

    async def until_gone(self, name: str) -> None:
        async def gone() -> bool:
            return await self.pod(name) is None

        await self.until(f"{name} is gone", gone)

    async def until_waiting(self, name: str, text: str) -> dict[str, Any]:
        async def waits() -> dict[str, Any] | None:
            waiting: dict[str, Any] = (await self.state(name)).get("waiting") or {}
            return waiting if text in waiting.get("message", "") else None

        found: dict[str, Any] = await self.until(f"{name} waits: {text}", waits)
        return found

    async def until_logged(self, name: str, text: str) -> list[str]:
        async def logged() -> list[str] | None:
            try:
                lines = await self.log(name)
            except KeyError:
                return None
            return lines if any(text in line for line in lines) else None

        found: list[str] = await self.until(f"{name} logs {text!r}", logged)
        return found

    async def log(self, name: str, container: str | None = None) -> list[str]:
        return [line.text async for line in self.nodes.logs(NAMESPACE, name, container=container)]

    async def node(self, name: str) -> Unstructured:
        return await self.client.get(NODES, None, name)

    async def until_ready(self, name: str, status: str = "True") -> Unstructured:
        async def is_so() -> Unstructured | None:
            try:
                node = await self.node(name)
            except NotFound:
                return None
            conditions = node.status.get("conditions") or ()
            return node if any(c["type"] == "Ready" and c["status"] == status for c in conditions) else None

        found: Unstructured = await self.until(f"{name} is Ready={status}", is_so)
        return found


@asynccontextmanager
async def started(temporary: Path, **options: Any) -> AsyncIterator[Machine]:
    clock = SystemClock()
    cluster = MemoryCluster(clock)
    given = {"timing": QUICK, "temporary": temporary, "issue_token": cluster.issue_token, **options}
    nodes = LocalNodes(cluster.client(), clock=clock, **given)
    task = asyncio.create_task(nodes.run())
    machine = Machine(cluster, nodes)
    try:
        yield machine
        assert not task.done(), task.exception()
    finally:
        await cancel(task)
        assert nodes.addresses.in_use == 0
        assert not nodes.folder.exists()
