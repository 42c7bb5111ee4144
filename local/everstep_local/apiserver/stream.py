"""One open watch: a feed, the clock that ends it, and its faults.

Invariant: without faults every event of the feed is delivered once and in order. The stream ends when its time is over,
with a bookmark shortly before if the resource has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import TypeAlias

from everstep_local.apiserver.faults import (
    Break,
    Delay,
    Disconnect,
    Drop,
    Duplicate,
    Expire,
    Faults,
    Request,
    Swap,
)
from everstep_local.apiserver.refusals import Refusal, expired
from everstep_local.apiserver.storage.feed import Feed, Notification
from everstep_operator.kube.errors import ConnectionFailed, Operation, StreamBroken
from everstep_operator.runtime.clock import Clock, cancel

BOOKMARK_LEAD = 2.0  # seconds before its end at which the server sends a watch its last bookmark
BOOKMARK_EVERY = 60.0

Delivered: TypeAlias = Notification | int  # an event, or the resource version of a bookmark


class Stream:
    """Use it as an async context manager; `events` once."""

    def __init__(
        self, feed: Feed, clock: Clock, seconds: float, faults: Faults | None, request: Request, operation: Operation
    ) -> None:
        self._feed, self._clock, self._seconds = feed, clock, float(seconds)
        self._faults, self._request, self._operation = faults, request, operation
        self._wake = asyncio.Event()
        self._bookmark_due = self._over = False
        self._delayed: list[Notification] = []

    async def __aenter__(self) -> Stream:
        self._unsubscribe = self._feed.subscribe(self._wake.set)
        self._unlisten = self._faults.listen(self._wake.set) if self._faults is not None else lambda: None
        self._timer = asyncio.ensure_future(self._time())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unsubscribe()
        self._unlisten()
        await cancel(self._timer)

    async def _time(self) -> None:
        left = self._seconds
        while left > BOOKMARK_LEAD:
            pause = min(BOOKMARK_EVERY, left - BOOKMARK_LEAD)
            await self._clock.sleep(pause)
            left -= pause
            self._bookmark_due = True
            self._wake.set()
        await self._clock.sleep(left)
        self._over = True
        self._wake.set()

    async def events(self) -> AsyncGenerator[Delivered, None]:
        """The events until the end. Raises ConnectionFailed, StreamBroken, Gone."""
        while True:
            self._wake.clear()
            if self._faults is not None and self._faults.is_cut:
                raise ConnectionFailed("the connection broke", operation=self._operation)
            try:
                pending = self._feed.take()
            except Refusal as refusal:
                raise refusal.error(self._operation) from None
            for event in pending:
                if self._faults is None:
                    yield event
                else:
                    for delivered in await self._struck(event, self._faults):
                        yield delivered
            if self._bookmark_due:
                self._bookmark_due = False
                position = self._feed.bookmark()
                if position is not None and not self._delayed:
                    yield position
                continue
            if self._over:
                for event in self._delayed:
                    yield event
                return
            await self._wake.wait()

    async def _struck(self, event: Notification, faults: Faults) -> list[Notification]:
        """The events that the faults deliver of `event`, after events that were held back before it."""
        namespace, name = event.object.key
        request = Request("event", self._request.plural, namespace, name)
        count, swap = 1, False
        for fault in faults.strike(request):
            match fault:
                case Delay(seconds):
                    await self._clock.sleep(seconds)
                case Drop():
                    count = 0
                case Duplicate():
                    count += 1
                case Swap():
                    swap = True
                case Disconnect():
                    raise ConnectionFailed("the connection broke", operation=self._operation)
                case Break():
                    raise StreamBroken("the stream ended inside a line", operation=self._operation)
                case Expire():
                    raise expired(0, event.object.version).error(self._operation)
                case _:
                    raise ValueError(f"{fault} strikes requests, not events of a watch; add it for another verb")
        if faults.is_cut:
            raise ConnectionFailed("the connection broke", operation=self._operation)
        delayed, self._delayed = self._delayed, []
        if swap and not delayed:
            self._delayed = [event] * count
            return []
        return [event] * count + delayed
