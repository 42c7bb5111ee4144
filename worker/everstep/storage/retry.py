"""Bounded retries with jittered back-off around any store, at the pace that the store allows.

One place retries, so that the bound is one number: backends try once, callers see either the result or an error that
outlived the outage the policy was made for. Nothing is retried but `RetryableError`, and a `NotFound` of an object that
the store's own listing names: gateways and proxies answer a bare 404 for a moment while they stop.

A create whose response was lost has happened: its retry raises `AlreadyExists`. Only the caller knows whether the
object is its own, and compares.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

from everstep.storage.base import ObjectStore
from everstep.storage.errors import NotFound, RetryableError, Throttled
from everstep.storage.rate_limit import Pacer, pacer_for
from everstep.storage.wrapped import WrappedStore

T = TypeVar("T")

log = logging.getLogger("everstep.storage")

SAY_SECONDS: Final = 5.0  # of failed attempts, after which a person hears of it
MAX_RETRY_AFTER: Final = 60.0  # seconds: a store that asks for more is asked again before


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Back-off between attempts, in seconds: exponential from `first` to `most`, each scaled by 0.5 to 1 at random.

    `outage` is how long the store may stay away before the operation fails; 75 covers the restart of an S3 server.
    `throttled` is the same for a store that answers, and asks for fewer requests. `listed` is for how long an object
    that is listed and not found is asked for again; it is short, because a listing may be stale.
    """

    first: float = 0.2
    most: float = 5.0
    outage: float = 75.0
    throttled: float = 600.0
    listed: float = 10.0

    def delay(self, attempt: int, jitter: float) -> float:
        """Seconds to wait after failed attempt number `attempt` (from 0); `jitter` is in [0, 1)."""
        return float(min(self.most, self.first * 2 ** min(attempt, 30)) * (0.5 + jitter / 2))


class RetryingStore(WrappedStore):
    """A store whose operations are repeated while the error is retryable and the policy's time lasts.

    The parts of an upload are repeated one by one: what the store has of it is never sent again. Without a `pacer`, all
    stores of this process on the same bucket share one.
    """

    def __init__(
        self,
        inner: ObjectStore,
        policy: RetryPolicy | None = None,
        *,
        pacer: Pacer | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(inner)
        self._policy = policy or RetryPolicy()
        self._pacer = pacer or pacer_for(inner.url)
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter or Random().random  # noqa: S311 - and no number of the script's own generator

    def call(self, operation: str, name: str, act: Callable[[], T], tear: Callable[[], None] = lambda: None) -> T:
        return self._read(name, act) if operation in ("get", "get_into") else self.repeat(act)

    def repeat(self, operation: Callable[[], T]) -> T:
        """Do `operation` until it succeeds, fails for good, or the policy's time is over."""
        began = self._clock()
        attempt, warned = 0, False
        while True:
            wait = self._pacer.reserve(self._clock())
            if wait > 0:
                self._sleep(wait)
            try:
                result = operation()
            except RetryableError as e:
                now = self._clock()
                if isinstance(e, Throttled):
                    self._pacer.throttled(now)
                limit = self._policy.throttled if isinstance(e, Throttled) else self._policy.outage
                delay = self._policy.delay(attempt, self._jitter())
                if e.retry_after is not None:
                    delay = max(delay, min(e.retry_after, MAX_RETRY_AFTER))
                if now + delay > began + limit:
                    raise type(e)(f"{e} (gave up after {attempt + 1} attempts)") from e
                if not warned and now - began > SAY_SECONDS:
                    warned = True
                    log.warning("%s: trying again, for %.0f s at most", e, began + limit - now)
            else:
                self._pacer.succeeded(self._clock())
                return result
            self._sleep(delay)
            attempt += 1

    def _read(self, name: str, operation: Callable[[], T]) -> T:
        deadline, attempt = self._clock() + self._policy.listed, 0
        while True:
            try:
                return self.repeat(operation)
            except NotFound:
                delay = self._policy.delay(attempt, self._jitter())
                if self._clock() + delay > deadline or not self._listed(name):
                    raise
            self._sleep(delay)
            attempt += 1

    def _listed(self, name: str) -> bool:
        folder, slash, _ = name.rpartition("/")
        return any(info.name == name for info in self.list(folder + slash))
