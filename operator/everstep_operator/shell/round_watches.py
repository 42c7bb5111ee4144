"""Calls that wait until a job's document or its presences change.

To answer all of them costs the operator time in proportion to their number and the document's size. So after a change
that woke many, the next ones are told together, a moment later: a thousand agents that join never ask for more than the
operator can answer, and three are told at once. Bounds: a pod's oldest call ends when it has too many.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

MAX_OF_POD = 8
PER_WATCH = 1e-3  # seconds of the operator's time for one answer, about


class Watches:
    """Of one job. `wake` ends all that wait, at once or soon."""

    def __init__(self) -> None:
        self._of_pod: dict[str, deque[asyncio.Future[None]]] = {}
        self._count = 0
        self._lapses: int | None = None
        self._not_before = 0.0
        self._waking: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return self._count

    async def wait(self, pod_uid: str, seconds: float) -> None:
        """Return at the next change, after `seconds`, or when the pod has too many of these."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        own = self._of_pod.setdefault(pod_uid, deque())
        own.append(woken)
        self._count += 1
        if len(own) > MAX_OF_POD:
            _end(own.popleft())
        timer = loop.call_later(seconds, _end, woken)
        try:
            await woken
        finally:
            timer.cancel()
            self._count -= 1
            with contextlib.suppress(ValueError):
                own.remove(woken)
            if not own and self._of_pod.get(pod_uid) is own:
                del self._of_pod[pod_uid]

    def wake_if_new(self, lapses: int) -> None:
        """Presences end: told if the count is another than at the last call."""
        if self._lapses is not None and self._lapses != lapses:
            self.wake()
        self._lapses = lapses

    def wake(self, *, pace: bool = True) -> None:
        """Something changed."""
        loop = asyncio.get_running_loop()
        left = self._not_before - loop.time()
        if pace and left > 0:
            if self._waking is None:
                self._waking = loop.call_later(left, self._wake)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        self._not_before = asyncio.get_running_loop().time() + self._count * PER_WATCH
        for own in self._of_pod.values():
            for woken in own:
                _end(woken)


def _end(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
