"""Time as something that is passed in.

Everything in this package that waits or measures does it through a `Clock`, so that tests and simulations can run days
in milliseconds. Two readings, never mixed: `monotonic` for durations and deadlines (a clock jump of an hour changes
nothing), `now` for the timestamps that people read. Timers of the event loop (`call_later`)
run on the loop's own clock; no reading of it is compared with one of these.
"""

import asyncio
import time
from collections.abc import Awaitable
from datetime import UTC, datetime
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


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel `tasks` and wait until each has ended; their results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
