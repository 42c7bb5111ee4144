"""Which write is next when an API server is slow, and that a write that is given up was never sent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from everstep_operator.runtime.fair_queueing import Flow
from everstep_operator.runtime.parallel import Raised, Returned
from everstep_operator.runtime.write_limit import NotBegun, WriteLane, WriteLimit, WriteSlots

LARGE, SMALL, OTHER = Flow("team-a", "large"), Flow("team-b", "small"), Flow("team-a", "other")


def slots(of_all: int = 4, of_job: int = 4) -> WriteSlots:
    return WriteSlots(dict.fromkeys(WriteLane, of_all), dict.fromkeys(WriteLane, of_job))


class SlowServer:
    """Writes that last until they are answered."""

    def __init__(self) -> None:
        self.open: dict[str, asyncio.Future[None]] = {}
        self.begun: list[str] = []

    def write(self, name: str) -> Callable[[], Awaitable[str]]:
        async def call() -> str:
            self.begun.append(name)
            self.open[name] = asyncio.get_running_loop().create_future()
            try:
                await self.open[name]
            finally:
                del self.open[name]
            return name

        return call

    async def answer(self, *names: str) -> None:
        for name in names:
            self.open[name].set_result(None)
        await turns()


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def never() -> bool:
    return False


async def test_how_long_a_write_waited_for_its_slot_is_told_by_lane() -> None:
    waits: list[tuple[WriteLane, float]] = []
    limit, server = (
        WriteLimit(slots(of_all=1), on_wait=lambda lane, seconds: waits.append((lane, seconds))),
        SlowServer(),
    )
    writes = [server.write("first"), server.write("second")]
    run = asyncio.create_task(limit.run(WriteLane.CREATE, LARGE, writes, stop=never))
    await turns()
    await asyncio.sleep(0.05)
    await server.answer("first")
    await server.answer("second")
    await run
    (first, at_once), (second, waited) = waits
    assert first is second is WriteLane.CREATE
    assert at_once < 0.05 <= waited


async def test_small_job_gets_the_next_slot_however_many_creates_of_a_large_one_wait() -> None:
    limit, server = WriteLimit(slots()), SlowServer()
    large = asyncio.create_task(
        limit.run(WriteLane.CREATE, LARGE, [server.write(f"l{i}") for i in range(50)], stop=never)
    )
    other = asyncio.create_task(
        limit.run(WriteLane.CREATE, OTHER, [server.write(f"o{i}") for i in range(50)], stop=never)
    )
    await turns()
    assert server.begun == ["l0", "l1", "l2", "l3"]
    small = asyncio.create_task(limit.run(WriteLane.CREATE, SMALL, [server.write("s0")], stop=never))
    await turns()
    await server.answer("l0", "l1", "l2")
    assert "s0" in server.begun, "the namespaces take turns"
    assert {"o0", "l4"} & set(server.begun), "so do the jobs of one"
    await server.answer("s0")
    assert small.done()
    large.cancel()
    other.cancel()
    await asyncio.gather(large, other, return_exceptions=True)


async def test_status_waits_for_no_create_and_a_create_for_no_event() -> None:
    limit, server = WriteLimit(slots(of_all=2, of_job=2)), SlowServer()
    busy = [
        asyncio.create_task(limit.run(lane, LARGE, [server.write(f"{lane.name}{i}") for i in range(9)], stop=never))
        for lane in (WriteLane.CREATE, WriteLane.EVENT)
    ]
    await turns()
    async with asyncio.timeout(5), limit.slot(WriteLane.CHANGE, LARGE):
        assert len(server.open) == 4
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)


async def test_writes_that_are_not_wanted_any_more_are_given_up_while_they_wait() -> None:
    limit, server = WriteLimit(slots(of_all=1)), SlowServer()
    edited = False
    first = asyncio.create_task(limit.run(WriteLane.CREATE, SMALL, [server.write("s0")], stop=never))
    waits = asyncio.create_task(
        limit.run(WriteLane.CREATE, LARGE, [server.write("l0"), server.write("l1")], stop=lambda: edited)
    )
    await turns()
    edited = True
    async with asyncio.timeout(5):
        assert await waits == [NotBegun(), NotBegun()]
    await server.answer("s0")
    assert await first == [Returned("s0")]
    assert server.begun == ["s0"]


async def test_writes_under_way_end_and_no_other_begins_once_stopped() -> None:
    limit, server = WriteLimit(slots(of_all=9, of_job=2)), SlowServer()
    stopped = False
    task = asyncio.create_task(
        limit.run(WriteLane.CREATE, LARGE, [server.write(f"l{i}") for i in range(5)], stop=lambda: stopped)
    )
    await turns()
    stopped = True
    await server.answer("l0", "l1")
    assert await task == [Returned("l0"), Returned("l1"), NotBegun(), NotBegun(), NotBegun()]


async def test_failed_write_neither_stops_nor_hides_the_others() -> None:
    limit = WriteLimit(slots(of_all=1))

    async def fails() -> str:
        raise ValueError("refused")

    async def succeeds() -> str:
        return "done"

    first, second = await limit.run(WriteLane.CREATE, LARGE, [fails, succeeds], stop=never)
    assert isinstance(first, Raised)
    assert second == Returned("done")


@pytest.mark.parametrize("seed", range(20))
async def test_no_slot_is_lost_whenever_passes_are_cancelled(seed: int) -> None:
    """Passes are cut at any moment, as they are when a leadership ends."""
    chance, limit, server = random.Random(seed), WriteLimit(slots(of_all=3, of_job=2)), SlowServer()
    running: list[asyncio.Task[object]] = []
    for number in range(60):
        flow = chance.choice((LARGE, SMALL, OTHER))
        calls = [server.write(f"{number}-{i}") for i in range(chance.randrange(1, 6))]
        running.append(asyncio.create_task(limit.run(WriteLane.CREATE, flow, calls, stop=never)))
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        assert len(server.open) <= 3
        if chance.random() < 0.5:
            chance.choice(running).cancel()
        unanswered = [future for future in server.open.values() if not future.done()]
        if unanswered and chance.random() < 0.5:
            chance.choice(unanswered).set_result(None)
            await asyncio.sleep(0)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    begun = asyncio.create_task(limit.run(WriteLane.CREATE, LARGE, [server.write("a"), server.write("b")], stop=never))
    third = asyncio.create_task(limit.run(WriteLane.CREATE, SMALL, [server.write("c")], stop=never))
    await turns()
    assert set(server.open) == {"a", "b", "c"}, "all three slots are free again"
    await server.answer("a", "b", "c")
    await asyncio.gather(begun, third)
