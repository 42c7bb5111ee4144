"""Calls that wait until a job's document or its presences change.

Answering all of them takes time in proportion to their number and the document's size. So after a change that woke many
calls, the next changes are reported together, a moment later; less important changes wait longer. So a thousand joining
agents never ask for more than the operator can answer, and three agents are answered at once. Bound: a pod's oldest
call ends when the pod has too many.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from enum import Enum

MAX_OF_POD = 8
AT_ONCE = 32  # calls that are answered in one turn of the event loop


class Urgency(Enum):
    """How long after the last change a change may be reported: seconds for each waiting call."""

    NOW = 0.0  # a round is formed, or the job ends
    SOON = 1e-3  # about the operator's time for one answer
    LATER = 4e-3  # some more agents wait for a round


class Watches:
    """The watches of one job. `wake` ends all waits, at once or soon."""

    def __init__(self) -> None:
        self._of_pod: dict[str, deque[asyncio.Future[None]]] = {}
        self._count = 0
        self._expirations: int | None = None
        self._woken, self._woken_at = 0, float("-inf")
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

    def wake_if_new(self, expirations: int) -> None:
        """Wake the watches if the count of expirations differs from that at the last call."""
        if self._expirations is not None and self._expirations != expirations:
            self.wake()
        self._expirations = expirations

    def wake(self, urgency: Urgency = Urgency.SOON) -> None:
        """Something changed."""
        loop = asyncio.get_running_loop()
        due = self._woken_at + max(self._woken, self._count) * urgency.value
        if due <= loop.time():
            self._wake()
        elif self._waking is None or self._waking.when() > due:
            self._cancel()
            self._waking = loop.call_at(due, self._wake)

    def _wake(self) -> None:
        self._cancel()
        self._woken, self._woken_at = self._count, asyncio.get_running_loop().time()
        self._answer_in_turns([woken for own in self._of_pod.values() for woken in own], 0)

    def _answer_in_turns(self, waiting: list[asyncio.Future[None]], answered: int) -> None:
        """Answer a few in each turn of the event loop: the renewal of the Lease must not wait for a thousand
        answers."""
        for woken in waiting[answered : answered + AT_ONCE]:
            _end(woken)
        if answered + AT_ONCE < len(waiting):
            asyncio.get_running_loop().call_soon(self._answer_in_turns, waiting, answered + AT_ONCE)

    def _cancel(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None


def _end(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
