"""Workers that have to leave their node, at a real API server: by `kubectl drain`, all at once, and by a taint.

The operator is real, and so are evictions, deletion with a grace period, and the watches that tell of them. The test
plays the kubelet, and the agents by the commands that they would give.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from everstep.contract.document import Member, Sizes
from everstep.membership.commands import Drain, Form, Join, KeepProcesses, Stop, Waited
from everstep_operator.kube.resources import NODES
from support.apiserver.operators import Place
from support.apiserver.rounds_stage import RoundsStage, pod_name, staged
from support.apiserver.waiting import eventually
from testcluster.controlplane import ControlPlane

pytestmark = pytest.mark.apiserver

SIZES = Sizes(3, 3)
JOB: dict[str, Any] = {"replicas": 3, "rendezvous": {"backend": "everstep"}}


@pytest.fixture
async def stage(place: Place) -> AsyncIterator[RoundsStage]:
    async with staged(place, **JOB) as made:
        await made.start(0, 1, 2, node=made.old)
        await made.announced(0)
        await made.agents(*(Join(Member(i, f"agent-{i}"), SIZES) for i in range(3)), Form("agent-0", 0, Waited.NOTHING))
        await made.agents(KeepProcesses("agent-0", 1))
        yield made


async def test_drain_of_the_node_with_all_workers_lets_one_stay_until_the_others_have_the_state(
    stage: RoundsStage, crd: ControlPlane
) -> None:
    options = ("--force", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s")
    drain = asyncio.create_task(asyncio.to_thread(crd.kubectl, "drain", stage.old, *options))
    await stage.announced(3)
    await stage.start(3, 4, 5, node=stage.new)
    stops = [Stop(f"agent-{i}") for i in range(3)]
    joins = [Join(Member(i, f"agent-{i}"), SIZES) for i in (3, 4, 5)]
    document = await stage.agents(*stops, *joins, Drain("agent-0", 1))
    assert [loss.agent for loss in document.gone] == ["agent-1", "agent-2"]
    document = await stage.agents(Join(Member(0, "agent-0"), SIZES), Form("agent-0", 1, Waited.NOTHING))
    assert [member.index for member in document.members] == [0, 3, 4]
    await stage.end(1, 2)
    await stage.announced(1)
    again = [Join(Member(i, f"agent-{i}"), SIZES) for i in (3, 4)]
    document = await stage.agents(Drain("agent-0", 2), *again, Form("agent-3", 2, Waited.NOTHING))
    assert sorted(member.index for member in document.members) == [3, 4, 5]
    await stage.end(0)
    await stage.roster(3, 5)
    await stage.announced(0)
    drained = await drain
    assert drained.returncode == 0, drained.stderr
    status = await stage.place.status()
    assert status["restarts"].get("total", 0) == 0
    assert [record["rung"] for record in status["recoveries"]] == ["migrate", "migrate"]
    assert (await stage.place.events()).count("WorkerLost") == 0


async def test_all_workers_leave_a_tainted_node_and_none_before_another_waits(stage: RoundsStage) -> None:
    taint = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}
    await stage.place.client.merge_patch(NODES, None, stage.old, {"spec": {"taints": [taint]}})
    await stage.announced(3)
    await stage.start(3, 4, 5, node=stage.new)
    pods = await stage.place.pods()
    assert all(pods[pod_name(i)].metadata.deletion_timestamp is None for i in range(3))
    await stage.agents(*(Join(Member(i, f"agent-{i}"), SIZES) for i in (3, 4, 5)))

    async def asked() -> list[int]:
        pods = await stage.place.pods()
        names = {i: pod_name(i) for i in range(3)}
        return [i for i, name in names.items() if name in pods and pods[name].metadata.deletion_timestamp is not None]

    async def two_are_asked() -> bool:
        return await asked() == [0, 1]

    await eventually("all but one are asked to stop", two_are_asked)
    await stage.agents(Stop("agent-0"), Stop("agent-1"), Drain("agent-0", 1))
    document = await stage.agents(Join(Member(2, "agent-2"), SIZES), Form("agent-2", 1, Waited.NOTHING))
    assert sorted(member.index for member in document.members) == [2, 3, 4]
    await stage.end(0, 1)

    async def last_is_asked() -> bool:
        return await asked() == [2]

    await eventually("the last one is asked to stop", last_is_asked)
    again = [Join(Member(i, f"agent-{i}"), SIZES) for i in (3, 4)]
    await stage.agents(Stop("agent-2"), Drain("agent-2", 2), *again, Form("agent-3", 2, Waited.NOTHING))
    await stage.end(2)
    await stage.roster(3, 5)
    assert (await stage.place.status())["restarts"].get("total", 0) == 0
