"""One limit for the writes of all jobs, so that a write that matters at once does not wait behind many that do not.

A slow API server (an admission webhook that takes seconds) holds each create for as long as it likes. So writes wait in
lanes: a status or a deletion never waits for a create, and an event, which only people read, is behind neither. In a
lane the jobs take turns (`fair_queueing`): a small job waits for one free slot, however many creates of a large one
wait. Invariants: at most `slots[lane]` writes of a lane are under way, and at most `of_job[lane]` of one job in one
pass. The sum of all slots is the number of connections of the client that carries them, so no write that may begin
waits for a connection. A write that waits can be given up at any moment, and nothing was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias, TypeVar

from everstep_operator.runtime.fair_queueing import Flow, RoundRobin
from everstep_operator.runtime.parallel import CallOutcome, Raised, Returned

T = TypeVar("T")

RECHECK = 0.25  # seconds: how soon a pass that waits for a slot learns that its writes are not wanted any more


class WriteLane(Enum):
    """What waits for what."""

    CHANGE = "statuses, deletions"
    CREATE = "objects that admission may hold up"
    EVENT = "events"


@dataclass(frozen=True, slots=True)
class WriteSlots:
    """`of_all`: writes under way in each lane; `of_job`: of one job."""

    of_all: Mapping[WriteLane, int] = field(
        default_factory=lambda: {WriteLane.CHANGE: 24, WriteLane.CREATE: 48, WriteLane.EVENT: 8}
    )
    of_job: Mapping[WriteLane, int] = field(
        default_factory=lambda: {WriteLane.CHANGE: 16, WriteLane.CREATE: 24, WriteLane.EVENT: 1}
    )

    @property
    def total(self) -> int:
        return sum(self.of_all.values())


@dataclass(frozen=True, slots=True)
class NotBegun:
    """The call was given up before it began."""


LimitedCallOutcome: TypeAlias = CallOutcome[T] | NotBegun


class WriteLimit:
    """Shared by everything that writes for jobs. Use it in one event loop."""

    def __init__(
        self, slots: WriteSlots | None = None, *, on_wait: Callable[[WriteLane, float], None] = lambda _, __: None
    ) -> None:
        """`on_wait` gets the seconds for which each write waited until it might begin."""
        self._on_wait = on_wait
        self._slots = slots or WriteSlots()
        self._free = dict(self._slots.of_all)
        self._waiting: dict[WriteLane, RoundRobin[asyncio.Future[None]]] = {lane: RoundRobin() for lane in WriteLane}

    @asynccontextmanager
    async def slot(self, lane: WriteLane, flow: Flow) -> AsyncIterator[None]:
        """One write, as soon as there is room for it."""
        await self._acquire(lane, flow, lambda: False, _now())
        try:
            yield
        finally:
            self._release(lane)

    async def run(
        self, lane: WriteLane, flow: Flow, calls: Sequence[Callable[[], Awaitable[T]]], *, stop: Callable[[], bool]
    ) -> list[LimitedCallOutcome[T]]:
        """The outcome of each call, in their order. A failed call stops no other one. Once `stop()` is true, no further
        call begins. Cancelling this cancels the running calls."""
        outcomes: list[LimitedCallOutcome[T]] = [NotBegun()] * len(calls)
        own = asyncio.Semaphore(self._slots.of_job[lane])

        async def run_call(number: int) -> None:
            try:
                outcomes[number] = Returned(await calls[number]())
            except Exception as error:
                outcomes[number] = Raised(error)

        def ended(_: asyncio.Task[None]) -> None:  # of a task that was cancelled before its first step, too
            own.release()
            self._release(lane)

        async with asyncio.TaskGroup() as group:
            for number in range(len(calls)):
                began = _now()
                await own.acquire()
                if not await self._acquire(lane, flow, stop, began):
                    break
                group.create_task(run_call(number)).add_done_callback(ended)
        return outcomes

    async def _acquire(self, lane: WriteLane, flow: Flow, stop: Callable[[], bool], began: float) -> bool:
        """Whether a slot was taken; False once `stop()` is true. `began`: since when the write waits."""
        if stop():
            return False
        if self._free[lane] and not self._waiting[lane]:
            self._free[lane] -= 1
            self._on_wait(lane, _now() - began)
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[lane].add(flow, turn)
        try:
            while not turn.done() and not stop():
                await asyncio.wait((turn,), timeout=RECHECK)
            if turn.done() and not stop():
                self._on_wait(lane, _now() - began)
                return True
        except asyncio.CancelledError:
            self._abandon(lane, turn)
            raise
        self._abandon(lane, turn)
        return False

    def _abandon(self, lane: WriteLane, turn: asyncio.Future[None]) -> None:
        """A waiter that gave up leaves the queue at its turn. A slot that it has already goes to the next one."""
        if turn.done():
            self._release(lane)
        else:
            turn.cancel()

    def _release(self, lane: WriteLane) -> None:
        self._free[lane] += 1
        waiting = self._waiting[lane]
        while self._free[lane] and waiting:
            turn = waiting.pop()
            if not turn.done():
                self._free[lane] -= 1
                turn.set_result(None)


def _now() -> float:
    return asyncio.get_running_loop().time()
