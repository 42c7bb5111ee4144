"""Time as something that is passed in.

Everything in this package that waits or measures does it through a `Clock`, so that tests and simulations can run days
in milliseconds. Two readings, never mixed: `monotonic` for durations and deadlines (a clock jump of an hour changes
nothing), `now` for the timestamps that people read.
"""

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back, and runs on while this process is stopped."""
        ...

    def now(self) -> datetime:
        """The wall clock, aware, UTC."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after at least `seconds`; zero or less still yields to the loop once."""
        ...


class SystemClock:
    """The machine's clocks."""

    # CLOCK_BOOTTIME also counts a suspended machine: a leader that wakes from suspend must know that its time ran out.
    _source = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

    def monotonic(self) -> float:
        return time.clock_gettime(self._source)

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


class ManualClock:
    """A clock that moves only when told: `await advance(seconds)` wakes sleepers in the order of their deadlines."""

    # Loop passes given to woken tasks before time moves on; a chain of awaits longer than this is cut by `advance`.
    _SETTLE = 50

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._wall = start
        self._elapsed = 0.0
        self._sequence = 0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        return self._elapsed

    def now(self) -> datetime:
        return self._wall

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sequence += 1
        heapq.heappush(self._sleepers, (self._elapsed + seconds, self._sequence, woken))
        await woken

    def jump_wall(self, seconds: float) -> None:
        """Move only the wall clock, as an operator or NTP would; sleepers do not notice."""
        self._wall += timedelta(seconds=seconds)

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass, running what becomes due at its own moment."""
        end = self._elapsed + seconds
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            due, _, woken = heapq.heappop(self._sleepers)
            self._move_to(max(due, self._elapsed))
            if not woken.done():
                woken.set_result(None)
                await self._settle()
        self._move_to(end)
        await self._settle()

    def _move_to(self, moment: float) -> None:
        self._wall += timedelta(seconds=moment - self._elapsed)
        self._elapsed = moment

    async def _settle(self) -> None:
        for _ in range(self._SETTLE):
            await asyncio.sleep(0)


async def within(clock: Clock, seconds: float, work: Awaitable[T]) -> T:
    """The result of `work`, or `TimeoutError` after `seconds` of `clock`; what did not finish is cancelled."""
    task = asyncio.ensure_future(work)
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait((task, timer), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise TimeoutError(f"no result within {seconds:g} s")
    finally:
        await cancel(task, timer)


async def wait_event(clock: Clock, event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until `event` is set, at most `seconds` (None: without limit); whether it is set."""
    if event.is_set():
        return True
    if seconds is None:
        return await event.wait()
    try:
        return await within(clock, seconds, event.wait())
    except TimeoutError:
        return event.is_set()


async def wait_until(clock: Clock, condition: Callable[[], bool], *, seconds: float, poll: float = 0.01) -> None:
    """Poll `condition` until it holds; `TimeoutError` after `seconds`. For conditions that nothing signals."""
    deadline = clock.monotonic() + seconds
    while not condition():
        if clock.monotonic() >= deadline:
            raise TimeoutError(f"condition did not hold within {seconds:g} s")
        await clock.sleep(poll)


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel `tasks` and wait until each has ended; their results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
