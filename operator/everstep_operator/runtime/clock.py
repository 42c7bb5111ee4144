"""Time as an argument.

All code of this package waits and measures through a `Clock`, so tests and simulations can run days in milliseconds. It
has two readings, which are never mixed: `monotonic` for durations and deadlines (a clock jump of an hour changes
nothing), and `now` for the timestamps that people read. Timers of the event loop (`call_later`) run on the loop's own
clock, whose readings are never compared with these.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds since an arbitrary moment. They never go back, and pass while this process is stopped too."""
        ...

    def now(self) -> datetime:
        """The wall clock: an aware datetime in UTC."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after at least `seconds`; zero or less still yields to the loop once."""
        ...


class SystemClock:
    """The machine's clocks."""

    # CLOCK_BOOTTIME also counts while the machine is suspended. A leader that wakes up must know that its time ran out.
    _source = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

    def monotonic(self) -> float:
        return time.clock_gettime(self._source)

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


async def within(clock: Clock, seconds: float, work: Awaitable[T]) -> T:
    """The result of `work`. After `seconds` of `clock` it is cancelled, and `TimeoutError` is raised."""
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
    """Wait until `event` is set, at most `seconds` (None: without limit). Return whether it is set."""
    if event.is_set():
        return True
    if seconds is None:
        return await event.wait()
    try:
        return await within(clock, seconds, event.wait())
    except TimeoutError:
        return event.is_set()


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel `tasks` and wait until each has ended. Drop their results and errors."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def shielded_cleanup(work: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run `work` to its end when the block is left, however often the task is cancelled meanwhile; so it needs a bound
    of its own. That cancellation is raised afterwards. It never replaces an error of the block."""
    try:
        yield
    except BaseException:
        await _to_its_end(work())
        raise
    if await _to_its_end(work()):
        raise asyncio.CancelledError


async def _to_its_end(work: Coroutine[Any, Any, None]) -> bool:
    """Whether the task was cancelled meanwhile."""
    running, cancelled = asyncio.ensure_future(work), False
    while not running.done():
        try:
            await asyncio.wait((running,))
        except asyncio.CancelledError:
            cancelled = True
    running.result()
    return cancelled
