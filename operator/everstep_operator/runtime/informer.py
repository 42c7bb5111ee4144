"""Keeps a cache equal to the API server's content, and reports what changed.

The informer lists, then watches from the list's position. A watch that ends or breaks is resumed where it stopped. A
watch whose history is gone (410), or that is silent for too long, is replaced by a new list. The difference between
list and cache yields every deletion that was missed. Errors neither end `run` nor empty the cache: while the server is
unreachable, readers keep the last known state. Handlers are synchronous and must not block: they put keys on a queue.

Silence: a server sends a bookmark each minute, and one just before it ends a watch. But it sends none (seen with 1.34)
while the resource has not changed since the server's start. So only one thing bounds the silence of a healthy watch:
the server ends it after `watch_seconds`. `silence_seconds` is that time plus slack.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from everstep_operator.kube.backoff import Backoff
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import (
    ConnectionFailed,
    Forbidden,
    Gone,
    KubeError,
    NotFound,
    Operation,
    StreamBroken,
)
from everstep_operator.kube.resources import Resource
from everstep_operator.kube.wire import KubeObject
from everstep_operator.runtime.cache import Added, Cache, Delta, Indexer
from everstep_operator.runtime.clock import Clock, cancel
from everstep_operator.runtime.randomness import Random

T = TypeVar("T", bound=KubeObject)
Handler: TypeAlias = Callable[[Delta[T]], None]

log = logging.getLogger(__name__)

# A list that is older than the cache is requested again this often. Then it is accepted: etcd was restored, so the
# server's history is an older one.
STALE_LISTS = 5


BACKOFF = Backoff(base=0.1, cap=10.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """Times in seconds. A watch shorter than `quick` counts as failed, so that reconnects do not become a hot loop."""

    watch_seconds: int = 30
    silence_seconds: float = 40.0
    quick: float = 1.0
    backoff: Backoff = BACKOFF


class Informer(Generic[T]):
    """Watches one resource. `run` it in a task, and read it any time after `wait_synced`."""

    def __init__(
        self,
        client: KubeClient,
        resource: Resource[T],
        *,
        clock: Clock,
        rng: Random,
        namespace: str | None = None,
        label_selector: str | None = None,
        indexers: Mapping[str, Indexer[T]] | None = None,
        timing: Timing = Timing(),
        relisted: Callable[[str], None] = lambda _: None,
        optional: bool = False,
    ) -> None:
        """`optional`: an error of its first list counts as a refusal. The cluster may have no such kind, or what
        converts its objects may be away. `relisted` is called with the resource when a watch was lost for good and
        everything was listed again."""
        self._client = client
        self._resource = resource
        self._clock = clock
        self._rng = rng
        self._namespace = namespace
        self._selector = label_selector
        self._timing = timing
        self._relisted = relisted
        self._refusals: tuple[type[KubeError], ...] = (KubeError,) if optional else (Forbidden,)
        self._cache: Cache[T] = Cache(indexers)
        self._handlers: list[Handler[T]] = []
        self._synced, self._answered = asyncio.Event(), asyncio.Event()
        self._failures = 0
        self._stale_lists = 0
        self._last_event_at = 0.0
        self._last_error: KubeError | None = None

    @property
    def plural(self) -> str:
        """The resource's name in a URL."""
        return self._resource.plural

    @property
    def has_synced(self) -> bool:
        """Whether the first list has arrived."""
        return self._synced.is_set()

    @property
    def is_refused(self) -> bool:
        """Whether the first list has not arrived because this account may not list the resource, or because an optional
        one failed. It is tried again."""
        return self.refusal is not None

    @property
    def refusal(self) -> str | None:
        """The server's words, if it is refused."""
        return str(self._last_error) if not self.has_synced and isinstance(self._last_error, self._refusals) else None

    @property
    def gone(self) -> str | None:
        """The server's words, if it does not serve the resource, or not any more."""
        return str(self._last_error) if self._failures and isinstance(self._last_error, NotFound) else None

    async def wait_synced(self) -> None:
        await self._synced.wait()

    async def wait_answered(self) -> None:
        """Return when the first list has arrived, or was refused."""
        await self._answered.wait()

    def get(self, namespace: str, name: str) -> T | None:
        """The cached object; None if it does not exist (cluster-scoped: `namespace=""`)."""
        return self._cache.get(namespace, name)

    def list(self, namespace: str | None = None) -> tuple[T, ...]:
        """All cached objects, sorted by (namespace, name)."""
        return self._cache.list(namespace)

    def by_index(self, index: str, value: str) -> tuple[T, ...]:
        """The cached objects for which indexer `index` yields `value`, sorted by (namespace, name)."""
        return self._cache.by_index(index, value)

    def add_handler(self, handler: Handler[T]) -> None:
        """Call `handler` with every later change, and at once with an `Added` for each object already known."""
        self._handlers.append(handler)
        for obj in self._cache.list():
            self._call_handler(handler, Added(obj))

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                await self._list()
                while True:
                    await self._watch()
            except KubeError as error:
                await self._pause(error)

    async def _list(self) -> None:
        listed = await self._client.list(self._resource, self._namespace, label_selector=self._selector)
        if self._cache.is_older_list(listed) and self._stale_lists < STALE_LISTS:
            self._stale_lists += 1
            raise Gone(
                f"the server's list at {listed.resource_version} is older than {self._cache.position}, which was "
                f"already seen; asking again ({self._stale_lists} of {STALE_LISTS})",
                operation=Operation("list", self._resource.plural),
            )
        self._stale_lists = 0
        if self.has_synced:
            self._relisted(self._resource.plural)
        self._emit(self._cache.replace(listed))
        self._synced.set()
        self._answered.set()
        log.debug("listed", extra={"resource": self._resource.plural, "objects": len(self._cache)})

    async def _watch(self) -> None:
        """Hold one watch. Return when it may be resumed from the cache's position; raise if a new list is needed."""
        started = self._last_event_at = self._clock.monotonic()
        consumer = asyncio.create_task(self._consume())
        try:
            while not consumer.done():
                left = self._last_event_at + self._timing.silence_seconds - self._clock.monotonic()
                if left <= 0:
                    raise ConnectionFailed(
                        f"no event, bookmark or end for {self._timing.silence_seconds:g} s; listing again",
                        operation=Operation("watch", self._resource.plural),
                    )
                timer = asyncio.ensure_future(self._clock.sleep(left))
                try:
                    await asyncio.wait((consumer, timer), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await cancel(timer)
            try:
                consumer.result()
            except (ConnectionFailed, StreamBroken) as error:
                # The position is still valid, so resume there: with a list each time, a flaky proxy would cause a storm
                # of lists. After a second failure without progress list again, because the stream's next line may be
                # what breaks it.
                if self._failures:
                    raise
                await self._pause(error)
                return
        finally:
            await cancel(consumer)
        if self._clock.monotonic() - started < self._timing.quick:
            operation = Operation("watch", self._resource.plural)
            await self._pause(StreamBroken("the server ended the watch at once", operation=operation))

    async def _consume(self) -> None:
        stream = self._client.watch(
            self._resource,
            self._namespace,
            resource_version=self._cache.position,
            label_selector=self._selector,
            timeout_seconds=self._timing.watch_seconds,
        )
        async with aclosing(stream):
            async for event in stream:
                self._last_event_at = self._clock.monotonic()
                self._failures = 0
                self._emit(self._cache.apply(event))

    async def _pause(self, error: KubeError) -> None:
        delay = max(self._timing.backoff.delay(self._failures, self._rng()), error.retry_after or 0.0)
        # The same reason is logged once: a server that is away for an hour must not fill the log.
        level = logging.DEBUG if str(error) == str(self._last_error) and self._failures else logging.WARNING
        log.log(
            level,
            "informer interrupted",
            extra={
                "resource": self._resource.plural,
                **({} if self._namespace is None else {"namespace": self._namespace}),
                "error": str(error),
                "retry_in_s": round(delay, 3),
            },
        )
        self._failures += 1
        self._last_error = error
        if self.is_refused:
            self._answered.set()
        await self._clock.sleep(delay)

    def _emit(self, deltas: tuple[Delta[T], ...]) -> None:
        for delta in deltas:
            for handler in self._handlers:
                self._call_handler(handler, delta)

    def _call_handler(self, handler: Handler[T], delta: Delta[T]) -> None:
        try:
            handler(delta)
        except Exception:
            # One handler's bug must not stop the cache for all others: failure mode 24 in
            # docs/operations/failure-modes.md.
            log.exception(
                "informer handler failed", extra={"resource": self._resource.plural, "key": "/".join(delta.object.key)}
            )
