"""Workers that have to leave their node, at a real API server: by `kubectl drain`, all at once, and by a taint.

The operator is real, and so are evictions, deletion with a grace period, and the watches that tell of them. The test
plays the kubelet, and the agents by the commands that they would give.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from everstep.contract import exit_codes
from everstep.contract.document import Document, Member, Sizes, decode, encode
from everstep.membership.commands import Command, Drain, Form, Join, KeepProcesses, Stop, Waited
from everstep.membership.machine import Rejected, apply
from everstep_operator.kube.resources import NODES, PODS
from everstep_operator.rounds.documents import JobRef
from everstep_operator.rounds.registry import RoundRegistry
from support.apiserver.operators import Operators, Place
from support.apiserver.waiting import eventually
from support.conformity.bodies import BINDINGS, CONFIGMAPS
from testcluster.controlplane import ControlPlane

pytestmark = pytest.mark.apiserver

SIZES = Sizes(3, 3)
JOB: dict[str, Any] = {"replicas": 3, "rendezvous": {"backend": "everstep"}}
POD = "digits-w{}-0"


class Stage:
    """A job of three workers on one of two nodes, and an operator that keeps its rounds."""

    def __init__(self, place: Place, rounds: RoundRegistry, job: JobRef) -> None:
        self.place, self.rounds, self.job = place, rounds, job
        self.old, self.new = f"{place.namespace}-old", f"{place.namespace}-new"

    async def document(self) -> Document:
        kept = await self.place.client.get(CONFIGMAPS, self.place.namespace, f"{self.job.name}-rounds")
        return decode(kept.data["document"].encode())

    async def agents(self, *commands: Command) -> Document:
        """Agents change the document, one after the other, as the operator that keeps it answers them."""
        after = await self.document()
        for command in commands:

            async def taken(command: Command = command) -> bool:
                nonlocal after
                seen = await self.rounds.of(self.job).read(0)
                assert seen.document is not None
                made = apply(decode(seen.document.encode()), command)
                assert not isinstance(made, Rejected), f"{command}: {made.reason}"
                after = made
                return await self.rounds.of(self.job).swap(seen.version, encode(made)) is not None

            await eventually(f"{command} is taken", taken)
        return after

    async def start(self, *indices: int, node: str) -> None:
        """The pods of these workers exist, and run on the node."""
        for index in indices:
            name = POD.format(index)

            async def exists(name: str = name) -> bool:
                return name in await self.place.names()

            await eventually(f"{name} exists", exists)
            target = {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
            await self.place.client.create(BINDINGS, self.place.namespace, target)
            await self.place.start(name)

    async def end(self, *indices: int) -> None:
        """The kubelet reports that their workers have left in order, and confirms the end of their pods."""
        for index in indices:
            await self.place.end(POD.format(index), exit_codes.PREEMPTED)
            await self.place.client.delete(PODS, self.place.namespace, POD.format(index), grace_seconds=0)

    async def announced(self, count: int) -> None:
        async def holds() -> bool:
            return (await self.document()).surge == count

        await eventually(f"{count} others are announced to the agents", holds)

    async def roster(self, first: int, last: int) -> None:
        """Wait until exactly these workers are published and have pods."""

        async def holds() -> bool:
            kept = [(part["first"], part["last"]) for part in (await self.place.status())["roster"]["workers"]]
            names = [POD.format(index) for index in range(first, last + 1)]
            return kept == [(first, last)] and await self.place.names() == names

        await eventually(f"workers {first} to {last} are left", holds)


@pytest.fixture
async def stage(place: Place) -> AsyncIterator[Stage]:
    job = await place.create_job(**JOB)
    async with Operators(place).run() as client:
        made = Stage(place, client.rounds, JobRef(place.namespace, "digits", job.metadata.uid))
        for node in (made.old, made.new):
            await place.client.create(NODES, None, {"metadata": {"name": node}})
            condition = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
            await place.client.patch_status(NODES, None, node, {"conditions": [condition]})
        await made.start(0, 1, 2, node=made.old)
        await made.announced(0)
        await made.agents(*(Join(Member(i, f"agent-{i}"), SIZES) for i in range(3)), Form("agent-0", 0, Waited.NOTHING))
        await made.agents(KeepProcesses("agent-0", 1))
        yield made
        for node in (made.old, made.new):
            await place.client.delete(NODES, None, node)


async def test_drain_of_the_node_with_all_workers_lets_one_stay_until_the_others_have_the_state(
    stage: Stage, crd: ControlPlane
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


async def test_all_workers_leave_a_tainted_node_and_none_before_another_waits(stage: Stage) -> None:
    taint = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}
    await stage.place.client.merge_patch(NODES, None, stage.old, {"spec": {"taints": [taint]}})
    await stage.announced(3)
    await stage.start(3, 4, 5, node=stage.new)
    pods = await stage.place.pods()
    assert all(pods[POD.format(i)].metadata.deletion_timestamp is None for i in range(3))
    await stage.agents(*(Join(Member(i, f"agent-{i}"), SIZES) for i in (3, 4, 5)))

    async def asked() -> list[int]:
        pods = await stage.place.pods()
        names = {i: POD.format(i) for i in range(3)}
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
