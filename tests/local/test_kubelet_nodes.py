"""Simulated nodes: where pods go, and what a node's death and return look like to the rest of the cluster."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep_local.apiserver.cluster import MemoryCluster
from everstep_local.kubelet.sources import PODS
from everstep_local.kubelet.status_reporter import StatusReporter
from everstep_local.nodes.controller import UNREACHABLE
from everstep_local.nodes.node import NodeTiming
from everstep_local.nodes.pool import LocalNodes
from everstep_operator.kube.errors import ServerError
from everstep_operator.kube.resources import LEASES
from everstep_operator.runtime.clock import SystemClock, cancel
from support.local import kubelet_world

Start = Callable[..., Any]
NS = "default"
TRAIN = """
import os, time
print(os.getpid(), flush=True)
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
time.sleep(600)
"""


async def node_of(m: Any, name: str) -> str:
    pod = await m.until_phase(name, "Running")
    return str(pod.spec["nodeName"])


async def test_nodes_are_ready_with_a_lease_that_is_renewed(machine: Start) -> None:
    m = await machine()
    for name in ("node-1", "node-2"):
        node = await m.until_ready(name)
        assert node.status["allocatable"] == {"pods": "16"}

    async def renewed() -> bool:
        lease = await m.client.get(LEASES, "kube-node-lease", "node-1")
        return bool(lease.spec.renew_time is not None and lease.spec.renew_time > first.spec.renew_time)

    first = await m.client.get(LEASES, "kube-node-lease", "node-1")
    await m.until("the lease is renewed", renewed)


async def test_pods_are_spread_and_the_one_too_many_waits_for_room(machine: Start) -> None:
    m = await machine(capacity={"pods": "1"})
    await m.until_ready("node-1")
    await m.until_ready("node-2")
    for name in ("a", "b"):
        await m.create(name, "sleep", "600")
    assert {await node_of(m, "a"), await node_of(m, "b")} == {"node-1", "node-2"}
    await m.create("c", "sleep", "600")

    async def refused() -> Any:
        conditions = (await m.pod("c")).status.get("conditions") or ()
        return next((c for c in conditions if c["type"] == "PodScheduled" and c["status"] == "False"), None)

    condition = await m.until("c is unschedulable", refused)
    assert (condition["reason"], condition["message"]) == ("Unschedulable", "0/2 nodes are available: 2 Too many pods.")
    freed = await node_of(m, "a")
    await m.delete("a", grace=1)
    assert await node_of(m, "c") == freed


async def test_killed_node_takes_its_pods_and_says_nothing(machine: Start) -> None:
    m = await machine()
    await m.create("a", sys.executable, "-c", TRAIN)
    name = await node_of(m, "a")

    async def both() -> list[str] | None:
        lines = await m.log("a")
        return lines if len(lines) == 2 else None

    pids = [int(line) for line in await m.until("two processes", both)]
    m.nodes.kill(name)
    await asyncio.wait_for(m.nodes.wait_off(name), 20)
    assert [pid for pid in pids if kubelet_world.alive(pid)] == []
    node = await m.until_ready(name, "Unknown")
    ready = next(c for c in node.status["conditions"] if c["type"] == "Ready")
    assert ready["reason"] == "NodeStatusUnknown"

    async def tainted() -> bool:
        return {t["effect"] for t in (await m.node(name)).spec.get("taints") or () if t["key"] == UNREACHABLE} == {
            "NoSchedule",
            "NoExecute",
        }

    await m.until("the node is tainted", tainted)
    assert (await m.pod("a")).status["phase"] == "Running"  # nobody is there to say otherwise
    await m.create("b", "sleep", "600")
    assert await node_of(m, "b") != name


async def test_killed_kubelet_does_not_finish_the_write_it_had_begun(machine: Start) -> None:
    m = await machine(names=())
    await m.create("a", "true")
    pod = await m.pod("a")
    client = m.cluster.client()
    read = client.get

    async def killed_meanwhile(*arguments: Any) -> Any:
        found = await read(*arguments)
        reporter.mute()
        return found

    client.get = killed_meanwhile
    reporter = StatusReporter(
        client, pod.key, pod.metadata.uid, clock=m.cluster.clock, rng=lambda: 0.5, on_gone=lambda: None
    )
    task = asyncio.create_task(reporter.run())
    reporter.show(lambda _previous, _now: {"phase": "Running"})
    await asyncio.wait_for(reporter.flush(), 5)
    await cancel(task)
    assert (await m.pod("a")).status["phase"] == "Pending"


async def test_node_that_comes_back_reports_what_it_lost(machine: Start) -> None:
    m = await machine(names=("node-1",))
    for name in ("stays", "deleted", "forced"):
        await m.create(name, "sleep", "600")
        await node_of(m, name)
    m.nodes.kill("node-1")
    await m.until_ready("node-1", "Unknown")
    await m.delete("deleted", grace=1)
    await m.delete("forced", grace=0)
    assert await m.pod("deleted") is not None  # bound to a node that is silent
    m.nodes.start("node-1")
    await m.until_ready("node-1")
    ended = await m.until_over("stays")
    assert (ended["exitCode"], ended["reason"]) == (255, "Unknown")
    await m.until_gone("deleted")

    async def untainted() -> bool:
        return not (await m.node("node-1")).spec.get("taints")

    await m.until("the node takes pods again", untainted)
    await m.create("next", "true")
    await m.until_phase("next", "Succeeded")
    assert len(list((m.nodes.folder / "node-1").iterdir())) == 2  # of pods that exist


async def test_node_killed_and_started_at_once_runs_no_pod_twice(machine: Start) -> None:
    m = await machine(names=("node-1",))
    await m.create("a", sys.executable, "-c", TRAIN)
    await node_of(m, "a")
    pid = m.nodes.pids(NS, "a")["worker"]
    m.nodes.kill("node-1")
    m.nodes.start("node-1")
    assert (await m.until_over("a"))["reason"] == "Unknown"
    assert not kubelet_world.alive(pid)


async def test_pod_recreated_under_its_name_is_another_pod(machine: Start) -> None:
    m = await machine()
    await m.create("a", "sh", "-c", "echo first; exec sleep 600")
    await m.until_logged("a", "first")
    await m.delete("a", grace=0)
    await m.create("a", "sh", "-c", "echo second; exec sleep 600")
    assert await m.until_logged("a", "second") == ["second"]


async def test_statuses_get_through_an_api_that_fails(machine: Start) -> None:
    m = await machine()
    await m.until_ready("node-1")
    failures = 6
    host = m.nodes._host  # the client that kubelets write with
    write = host.client.patch_status

    async def sometimes(resource: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal failures
        if resource.plural == PODS.plural and failures:
            failures -= 1
            raise ServerError("not now")
        return await write(resource, *arguments, **options)

    host.client.patch_status = sometimes
    await m.create("a", "sh", "-c", "exit 5")
    assert (await m.until_over("a"))["exitCode"] == 5
    assert failures == 0


async def test_pod_goes_even_if_its_status_is_never_taken(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatusReporter.flush, "__defaults__", (0.2,))
    m = await machine()

    async def never(*_: Any, **__: Any) -> Any:
        raise ServerError("not this one")

    await m.create("a", "sleep", "600")
    await m.until_phase("a", "Running")
    m.nodes._host.client.patch_status = never
    await m.delete("a", grace=1)
    await m.until_gone("a")


def test_timing_without_two_heartbeats_in_its_grace_is_refused() -> None:
    with pytest.raises(ValueError, match="two heartbeats"):
        NodeTiming(heartbeat=1, grace=2)


def test_capacity_that_is_no_quantity_is_refused_with_its_name(tmp_path: Path) -> None:
    clock = SystemClock()
    cluster = MemoryCluster(clock)
    with pytest.raises(ValueError, match="memory: '8 GB' is not a quantity"):
        LocalNodes(cluster.client(), cluster.issue_token, clock=clock, capacity={"memory": "8 GB"}, temporary=tmp_path)
    assert list(tmp_path.iterdir()) == []
