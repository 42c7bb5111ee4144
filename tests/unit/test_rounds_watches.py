"""When those who wait are told: at once if they are few or it matters, together and later if they are many."""

from __future__ import annotations

import asyncio

import pytest

from everstep_operator.rounds.watches import Urgency, Watches
from support.clocks.virtual_time import in_virtual_time

MANY = 100


def waiting(watches: Watches) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(watches.wait(f"pod-{i}", 30.0)) for i in range(MANY)]


async def seconds_until_told(watches: Watches, urgency: Urgency) -> float:
    calls = waiting(watches)
    await asyncio.sleep(0)
    now = asyncio.get_running_loop().time
    began = now()
    watches.wake(urgency)
    async with asyncio.timeout(10):
        await asyncio.gather(*calls)
    return now() - began


@in_virtual_time
async def test_many_are_told_the_later_the_less_it_matters() -> None:
    watches = Watches()
    await seconds_until_told(watches, Urgency.SOON)  # the first news are told at once, and this was their moment
    assert await seconds_until_told(watches, Urgency.NOW) == 0
    assert await seconds_until_told(watches, Urgency.SOON) == pytest.approx(0.1)
    assert await seconds_until_told(watches, Urgency.LATER) == pytest.approx(0.4)


@in_virtual_time
async def test_urgent_news_take_along_those_that_could_wait() -> None:
    watches = Watches()
    await seconds_until_told(watches, Urgency.NOW)
    calls = waiting(watches)
    await asyncio.sleep(0)
    watches.wake(Urgency.LATER)
    watches.wake(Urgency.NOW)
    async with asyncio.timeout(0.3):
        await asyncio.gather(*calls)
    again = waiting(watches)
    await asyncio.sleep(0.5)  # longer than the later one was to come
    assert len(watches) == MANY  # and nobody is told twice
    for call in again:
        call.cancel()


@in_virtual_time
async def test_others_have_their_turn_while_many_are_told() -> None:
    watches = Watches()
    calls = waiting(watches)
    await asyncio.sleep(0)
    watches.wake(Urgency.NOW)
    turns = 0
    async with asyncio.timeout(10):
        while not all(call.done() for call in calls):
            assert sum(call.done() for call in calls) <= turns * 32
            await asyncio.sleep(0)
            turns += 1
    assert turns >= MANY // 32


@in_virtual_time
async def test_few_are_told_at_once_whatever_it_is() -> None:
    watches = Watches()
    for _ in range(3):
        call = asyncio.create_task(watches.wait("pod", 30.0))
        await asyncio.sleep(0)
        began = asyncio.get_running_loop().time()
        watches.wake(Urgency.LATER)
        await call
        assert asyncio.get_running_loop().time() - began <= Urgency.LATER.value
