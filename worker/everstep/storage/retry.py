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

from everstep.storage.base import Capabilities, ObjectInfo, ObjectStore
from everstep.storage.errors import NotFound, RetryableError, Throttled
from everstep.storage.rate_limit import Pacer, pacer_for
from everstep.storage.upload import Data, Upload

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


class RetryingStore(ObjectStore):
    """A store whose operations are repeated while the error is retryable and the policy's time lasts.

    Without a `pacer`, all stores of this process on the same bucket share one.
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
        self._inner = inner
        self._policy = policy or RetryPolicy()
        self._pacer = pacer or pacer_for(inner.url)
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter or Random().random  # noqa: S311 - and no number of the script's own generator

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def create(self, name: str, data: Data) -> None:
        self.repeat(lambda: self._inner.create(name, data))

    def put(self, name: str, data: Data) -> None:
        self.repeat(lambda: self._inner.put(name, data))

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._read(name, lambda: self._inner.get(name, start, end))

    def get_into(self, name: str, start: int, *buffers: memoryview) -> None:
        self._read(name, lambda: self._inner.get_into(name, start, *buffers))

    def size(self, name: str) -> int | None:
        return self.repeat(lambda: self._inner.size(name))

    def list(self, folder: str = "") -> list[ObjectInfo]:
        return self.repeat(lambda: self._inner.list(folder))

    def delete(self, name: str) -> None:
        self.repeat(lambda: self._inner.delete(name))

    def start_upload(self, name: str, size_hint: int | None = None) -> Upload:
        return RetryingUpload(self, self.repeat(lambda: self._inner.start_upload(name, size_hint)))

    def sweep_uploads(self, older_than: float, dead: Callable[[str], bool] = lambda name: False) -> int:
        return self.repeat(lambda: self._inner.sweep_uploads(older_than, dead))

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


class RetryingUpload:
    """An upload whose parts are repeated one by one: what the store has of it is never sent again."""

    def __init__(self, store: RetryingStore, inner: Upload) -> None:
        self._store = store
        self._inner = inner

    @property
    def part_size(self) -> int:
        return self._inner.part_size

    def write_part(self, number: int, data: Data) -> None:
        self._store.repeat(lambda: self._inner.write_part(number, data))

    def commit(self) -> None:
        self._store.repeat(self._inner.commit)

    def abort(self) -> None:
        self._store.repeat(self._inner.abort)
