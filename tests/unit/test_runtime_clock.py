"""Clocks, waiting with a limit, and bounded parallel writes."""

import asyncio

import pytest

from everstep_operator.runtime.clock import SystemClock, shielded_cleanup, wait_event, within
from everstep_operator.runtime.parallel import Raised, Returned, run_bounded
from support.clocks.manual import ManualClock


async def test_sleepers_wake_in_the_order_of_their_deadlines_at_their_own_moment() -> None:
    clock = ManualClock()
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.monotonic()))

    tasks = [asyncio.create_task(sleeper(n, s)) for n, s in (("late", 5.0), ("early", 1.0), ("never", 99.0))]
    await clock.advance(10)
    assert woken == [("early", 1.0), ("late", 5.0)]
    assert (clock.now() - ManualClock().now()).total_seconds() == 10
    tasks[2].cancel()


async def test_work_that_outlives_its_limit_is_cancelled() -> None:
    clock = ManualClock()
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.create_task(within(clock, 3.0, work()))
    await clock.advance(3.1)
    with pytest.raises(TimeoutError, match="within 3 s"):
        await waiting
    assert ended.is_set()


@pytest.mark.parametrize(
    ("error", "cancellations", "raised"),
    [
        (None, 0, None),
        (None, 2, asyncio.CancelledError),
        (ValueError, 0, ValueError),
        (ValueError, 2, ValueError),
        (asyncio.CancelledError, 1, asyncio.CancelledError),
    ],
)
async def test_cleanup_goes_to_its_end_and_no_cancellation_replaces_an_error(
    error: type[BaseException] | None, cancellations: int, raised: type[BaseException] | None
) -> None:
    begun, may_end, steps = asyncio.Event(), asyncio.Event(), list[str]()

    async def clean() -> None:
        steps.append("begun")
        begun.set()
        await may_end.wait()
        steps.append("ended")

    async def run() -> None:
        async with shielded_cleanup(clean):
            if error is not None:
                raise error

    task = asyncio.create_task(run())
    await begun.wait()
    for _ in range(cancellations):
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    assert steps == ["begun", "ended"]
    assert type(outcome) is (raised or type(None))


async def test_cancelling_the_wait_cancels_the_work() -> None:
    clock = ManualClock()
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.create_task(within(clock, 3.0, work()))
    await clock.advance(1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert ended.is_set()


async def test_waiting_for_an_event_tells_whether_it_came() -> None:
    clock, event = ManualClock(), asyncio.Event()
    waiting = asyncio.create_task(wait_event(clock, event, 5.0))
    await clock.advance(6)
    assert await waiting is False
    event.set()
    assert await wait_event(clock, event, 0.0) is True


async def test_system_clock_measures_what_it_sleeps() -> None:
    clock = SystemClock()
    before, wall = clock.monotonic(), clock.now()
    await clock.sleep(0.02)
    assert 0.015 <= clock.monotonic() - before < 5
    assert wall.tzinfo is not None


async def test_calls_run_at_most_limit_at_a_time_and_keep_their_order_and_errors() -> None:
    clock = ManualClock()
    running = 0
    most = 0

    async def call(n: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await clock.sleep(10 - n)
        running -= 1
        if n == 3:
            raise ValueError("third")
        return n

    together = asyncio.create_task(run_bounded([lambda n=n: call(n) for n in range(7)], limit=3))
    await clock.advance(60)
    outcomes = together.result()
    assert most == 3
    assert [o.value for o in outcomes if isinstance(o, Returned)] == [0, 1, 2, 4, 5, 6]
    assert isinstance(outcomes[3], Raised)
    assert str(outcomes[3].error) == "third"
