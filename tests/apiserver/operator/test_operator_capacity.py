"""An elastic job with less room than it wants, at a real API server: it shrinks to what can run, and grows again."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from everstep.contract.document import Member, Sizes
from everstep.membership.commands import Command, Form, Join, KeepProcesses, Leave, Waited
from support.apiserver.operators import Place
from support.apiserver.rounds_stage import RoundsStage, pod_name, staged
from support.apiserver.waiting import eventually

pytestmark = pytest.mark.apiserver

SIZES = Sizes(2, 4)
JOB: dict[str, Any] = {
    "replicas": 4,
    "elastic": {"minReplicas": 2, "maxReplicas": 4},
    "rendezvous": {"backend": "everstep"},
}


def joins(*agents: tuple[int, int]) -> list[Command]:
    return [Join(Member(i, f"agent-{i}-{n}", n), SIZES) for i, n in agents]


@pytest.fixture
async def stage(place: Place) -> AsyncIterator[RoundsStage]:
    """Workers 0 and 1 are on the new node, and 2 and 3 on the old one. All train in round 1."""
    async with staged(place, **JOB) as made:
        await made.start(0, 1, node=made.new)
        await made.start(2, 3, node=made.old)
        await made.announced(0)
        await made.agents(*joins((0, 0), (1, 0), (2, 0), (3, 0)), Form("agent-0-0", 0, Waited.NOTHING))
        await made.agents(KeepProcesses("agent-0-0", 1))
        yield made


async def test_job_shrinks_to_what_can_run_and_grows_by_no_node_that_was_just_lost(stage: RoundsStage) -> None:
    await stage.node_is(stage.old, "Unknown")
    for index in (2, 3):
        await stage.is_there(pod_name(index, 1))
        await cannot_be_scheduled(stage, pod_name(index, 1))
    lost = [Leave(f"agent-{i}-0", "its lease expired") for i in (2, 3)]
    document = await stage.agents(*lost, *joins((0, 0), (1, 0)), Form("agent-0-0", 1, Waited.NOTHING))
    assert [member.index for member in document.members] == [0, 1]
    await says(stage, "2/4 train, min 2: worker 2 cannot be scheduled")
    await stage.node_is(stage.old, "True")
    await stage.start(2, 3, node=stage.old, incarnation=1)
    await says(stage, f"workers 2, 3 wait until .* because node {stage.old} was lost")
    await most(stage, 2)
    document = await stage.agents(*joins((2, 1), (3, 1)))
    assert (document.round, len(document.joining)) == (2, 2)
    # A member that is lost meanwhile is replaced by one that waits.
    await stage.place.end(pod_name(1), 137)
    again = [Leave("agent-1-0", "its process ended"), *joins((0, 0))]
    document = await stage.agents(*again, Form("agent-0-0", 2, Waited.NOTHING))
    assert [member.index for member in document.members] == [0, 2]
    await stage.is_there(pod_name(1, 1))
    await stage.start(1, node=stage.new, incarnation=1)
    await most(stage, 3)
    assert (await stage.place.status())["restarts"]["lostNodes"][0]["name"] == stage.old


async def test_worker_that_finds_another_node_gets_its_place_at_once(stage: RoundsStage) -> None:
    await stage.node_is(stage.old, "Unknown")
    for index in (2, 3):
        await stage.is_there(pod_name(index, 1))
    lost = [Leave(f"agent-{i}-0", "its lease expired") for i in (2, 3)]
    await stage.agents(*lost, *joins((0, 0), (1, 0)), Form("agent-0-0", 1, Waited.NOTHING))
    await most(stage, 2)
    await stage.start(2, node=stage.new, incarnation=1)
    await most(stage, 3)


async def cannot_be_scheduled(stage: RoundsStage, name: str) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}
    await stage.place.set_pod(name, {"conditions": [condition]})


async def says(stage: RoundsStage, pattern: str) -> None:
    async def holds() -> bool:
        conditions = (await stage.place.status()).get("conditions", ())
        return any(c["type"] == "Ready" and re.search(pattern, c["message"]) for c in conditions)

    await eventually(f"the job says: {pattern}", holds)


async def most(stage: RoundsStage, workers: int) -> None:
    async def holds() -> bool:
        return (await stage.document()).sizes == Sizes(2, workers)

    await eventually(f"a round may have at most {workers} workers", holds)
