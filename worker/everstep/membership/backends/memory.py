"""A round store in this process: for tests, benchmarks, and jobs whose agents are threads.

Invariant: it is the reference for the semantics that `store` promises; etcd must behave the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from everstep.membership.store import View


@dataclass(slots=True)
class _Presence:
    value: bytes
    ttl: float
    until: float


class MemoryStore:
    """One job. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._document: bytes | None = None
        self._version = 0
        self._expirations = 0
        self._present: dict[str, _Presence] = {}
        self._earliest = float("inf")  # no presence expires before this; a renewal can only make it too early

    def read(self) -> View:
        with self._changed:
            self._expire()
            return View(self._document, self._version, self._expirations)

    def compare_and_swap(self, expected: int, document: bytes) -> int | None:
        with self._changed:
            if self._version != expected:
                return None
            self._document, self._version = document, self._version + 1
            self._changed.notify_all()
            return self._version

    def watch(self, seen: View, timeout: float) -> View:
        deadline = self._clock() + timeout
        with self._changed:
            while True:
                self._expire()
                now = self._clock()
                changed = (self._version, self._expirations) != (seen.version, seen.expirations)
                if changed or now >= deadline:
                    return View(self._document, self._version, self._expirations)
                self._changed.wait(min(deadline, self._earliest) - now)

    def announce(self, agent: str, value: bytes, ttl: float) -> float:
        with self._changed:
            until = self._clock() + ttl
            self._present[agent] = _Presence(value, ttl, until)
            if until < self._earliest:
                self._earliest = until
                self._changed.notify_all()  # a waiter that sleeps until the old earliest expiration would wake too late
        return 0.0

    def renew(self, agent: str) -> bool:
        with self._changed:
            self._expire()
            presence = self._present.get(agent)
            if presence is None:
                return False
            presence.until = self._clock() + presence.ttl
            return True

    def withdraw(self, agent: str) -> None:
        with self._changed:
            if self._present.pop(agent, None) is not None:
                self._count_expiration(1)

    def present(self) -> Mapping[str, bytes]:
        with self._changed:
            self._expire()
            return {agent: presence.value for agent, presence in self._present.items()}

    def close(self) -> None:
        """Does nothing: this store holds no connection and no thread."""

    def _expire(self) -> None:
        now = self._clock()
        if now < self._earliest:
            return
        expired = [agent for agent, presence in self._present.items() if presence.until <= now]
        for agent in expired:
            del self._present[agent]
        self._earliest = min((presence.until for presence in self._present.values()), default=float("inf"))
        if expired:
            self._count_expiration(len(expired))

    def _count_expiration(self, count: int) -> None:
        self._expirations += count
        self._changed.notify_all()
