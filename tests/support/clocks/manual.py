"""A clock for tests: days pass in milliseconds, and only when a test says so."""

import asyncio
import heapq
from datetime import UTC, datetime, timedelta


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
