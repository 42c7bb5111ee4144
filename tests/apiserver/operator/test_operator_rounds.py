"""The round store's two writes at a real API server: the ConfigMap by resource version, the status by the job's."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from everstep.contract.document import MAX_BYTES, Document, Member, Sizes, decode, encode
from everstep.membership.commands import Command, Form, Join, Waited
from everstep.membership.machine import Rejected, apply
from everstep_operator.kube.resources import CONFIGMAPS
from everstep_operator.main import JOBS
from everstep_operator.rounds.agent_lookup import Agent
from everstep_operator.rounds.documents import JobRef, RoundDocuments
from everstep_operator.rounds.presence import Worker
from everstep_operator.rounds.registry import RoundRegistry
from everstep_operator.runtime.clock import SystemClock
from support.apiserver.operators import Place, wait_until_collected
from support.apiserver.waiting import eventually

pytestmark = pytest.mark.apiserver

SIZES = Sizes(1, 2)


class Life:
    """One job, and any number of operators that all believe to lead."""

    def __init__(self, place: Place, job: Any) -> None:
        self.place, self.ref = place, JobRef(place.namespace, job.metadata.name, job.metadata.uid)
        self.agents = [Agent(self.ref, Worker(f"uid-{i}", i, 0)) for i in range(2)]
        self.epochs = 0

    def operator(self) -> RoundRegistry:
        self.epochs += 1
        epoch = self.epochs
        documents = RoundDocuments(self.place.client, JOBS, require_leading=lambda: epoch)
        return RoundRegistry(documents, clock=SystemClock(), epoch=lambda: epoch)

    async def kept(self) -> Document:
        found = await self.place.client.get(CONFIGMAPS, self.place.namespace, f"{self.ref.name}-rounds")
        return decode(found.data["document"].encode())

    async def published(self) -> int:
        return int((await self.place.status()).get("world", {}).get("round", 0))


async def change(rounds: RoundRegistry, agent: Agent, event: Command) -> bool:
    sight = await rounds.of(agent.job).read(0)
    after = apply(Document(SIZES) if sight.document is None else decode(sight.document.encode()), event)
    assert not isinstance(after, Rejected), after
    return await rounds.of(agent.job).swap(sight.version, encode(after)) is not None


async def formed(life: Life, rounds: RoundRegistry) -> None:
    for i in range(2):
        assert await change(rounds, life.agents[i], Join(Member(i, f"agent-{i}"), SIZES))
    assert await change(rounds, life.agents[0], Form("agent-0", 0, Waited.NOTHING))


async def test_round_is_published_then_kept_and_another_operator_goes_on_with_the_same_versions(place: Place) -> None:
    life = Life(place, await place.create_job())
    first = life.operator()
    await formed(life, first)
    assert (await life.published(), (await life.kept()).round) == (1, 1)
    assert [m.agent for m in (await life.kept()).members] == ["agent-0", "agent-1"]
    second = life.operator()
    sight = await first.of(life.ref).read(0)
    assert (await second.of(life.ref).read(0)).version == sight.version
    assert await change(second, life.agents[0], Join(Member(0, "agent-0"), SIZES))
    # The first one does not know it: its swap is refused by the API server, and its next sight is the new one.
    assert not await change(first, life.agents[1], Join(Member(1, "agent-1"), SIZES))
    assert await change(first, life.agents[1], Join(Member(1, "agent-1"), SIZES))
    assert len((await life.kept()).joining) == 2


async def test_operators_that_form_the_same_round_at_once_form_one(place: Place) -> None:
    life = Life(place, await place.create_job())
    operators = [life.operator() for _ in range(4)]
    for i in range(2):
        assert await change(operators[0], life.agents[i], Join(Member(i, f"agent-{i}"), SIZES))
    for one in operators:
        await one.of(life.ref).read(0)
    done = await asyncio.gather(
        *(change(one, life.agents[0], Form("agent-0", 0, Waited.NOTHING)) for one in operators), return_exceptions=True
    )
    assert sum(outcome is True for outcome in done) <= 1
    kept = await life.kept()
    assert len(kept.members) == 2
    assert 1 <= kept.round <= await life.published() <= 4


async def test_planner_that_writes_status_all_the_time_holds_no_round_up(place: Place) -> None:
    life = Life(place, await place.create_job())
    rounds = life.operator()

    async def planner() -> None:
        for i in range(10_000):
            await place.client.patch_status(JOBS, place.namespace, life.ref.name, {"readyReplicas": i})
            await asyncio.sleep(0.02)

    writing = asyncio.create_task(planner())
    try:
        await formed(life, rounds)
    finally:
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing
    assert (await life.published(), (await life.kept()).round) == (1, 1)


async def test_largest_document_is_kept(place: Place) -> None:
    life = Life(place, await place.create_job())
    rounds = life.operator()
    members = tuple(Member(i, f"agent-{i:04}", address="x" * 190) for i in range(4096))
    data = encode(Document(Sizes(1, 4096), joining=members))
    data += b" " * (MAX_BYTES - len(data))
    version = await rounds.of(life.ref).swap(0, data)
    assert version is not None
    assert await rounds.of(life.ref).swap(version, encode(Document(SIZES))) is not None


@pytest.mark.long
async def test_document_goes_with_its_job(place: Place) -> None:
    await wait_until_collected(place)
    life = Life(place, await place.create_job())
    await formed(life, life.operator())
    await place.client.delete(JOBS, place.namespace, life.ref.name, propagation="Background")

    async def gone() -> bool:
        listed = (await place.client.list(CONFIGMAPS, place.namespace)).items
        return f"{life.ref.name}-rounds" not in {one.metadata.name for one in listed}

    await eventually("the ConfigMap is collected", gone)
