"""The informer over a scripted server: every way in which a watch ends, lies or falls silent."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import pytest

from everstep_operator.kube.client import Bookmark, Changed, EventType, ListResult, WatchEvent
from everstep_operator.kube.errors import (
    ConnectionFailed,
    Forbidden,
    Gone,
    KubeError,
    NotFound,
    ServerError,
    StreamBroken,
)
from everstep_operator.kube.resources import PODS
from everstep_operator.kube.wire import ObjectMeta, Pod
from everstep_operator.runtime.cache import Added, Deleted, Delta, Updated
from everstep_operator.runtime.informer import Informer, Timing
from support.clocks.manual import ManualClock


class Server:
    """A history of pods, served as lists and watches; the test decides what goes wrong."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.version = 0
        self.pods: dict[str, Pod] = {}
        self.history: list[Changed[Pod]] = []
        self.compacted = 0
        self.list_errors: list[KubeError] = []
        self.break_with: KubeError | None = None
        self.silent = False
        self.news = asyncio.Event()
        self.lists = 0
        self.watches = 0
        self.stale_list: ListResult[Pod] | None = None

    def write(self, name: str, *, uid: str = "u") -> Pod:
        self.version += 1
        meta = ObjectMeta(name=name, namespace="ns", uid=uid, resource_version=str(self.version))
        obj = Pod(metadata=meta)
        self._record(EventType.MODIFIED if name in self.pods else EventType.ADDED, obj)
        self.pods[name] = obj
        return obj

    def remove(self, name: str) -> None:
        self.version += 1
        old = self.pods.pop(name).metadata
        meta = ObjectMeta(name=name, namespace="ns", uid=old.uid, resource_version=str(self.version))
        self._record(EventType.DELETED, Pod(metadata=meta))

    def _record(self, kind: EventType, obj: Pod) -> None:
        self.history.append(Changed(kind, obj))
        self.news.set()

    def disturb(self, error: KubeError) -> None:
        """End every open watch with `error`, once."""
        self.break_with = error
        self.news.set()

    async def list(self, *_: Any, **__: Any) -> ListResult[Pod]:
        self.lists += 1
        if self.list_errors:
            raise self.list_errors.pop(0)
        if self.stale_list is not None:
            return self.stale_list
        return ListResult(tuple(self.pods.values()), str(self.version))

    async def watch(
        self, *_: Any, resource_version: str, timeout_seconds: int, **__: Any
    ) -> AsyncGenerator[WatchEvent[Pod], None]:
        self.watches += 1
        sent = int(resource_version)
        end = self.clock.monotonic() + timeout_seconds
        if sent < self.compacted:
            raise Gone("too old resource version", status=410)
        while True:
            if self.silent:
                await asyncio.Event().wait()
            for event in list(self.history):
                if int(event.resource_version) > sent:
                    sent = int(event.resource_version)
                    yield event
            if self.break_with is not None:
                error, self.break_with = self.break_with, None
                raise error
            if self.clock.monotonic() >= end:
                yield Bookmark(str(self.version))
                return
            self.news.clear()
            timer = asyncio.ensure_future(self.clock.sleep(end - self.clock.monotonic()))
            news = asyncio.ensure_future(self.news.wait())
            try:
                await asyncio.wait((timer, news), return_when=asyncio.FIRST_COMPLETED)
            finally:
                timer.cancel()
                news.cancel()


class Bench:
    def __init__(self, *, optional: bool = False) -> None:
        self.clock = ManualClock()
        self.server = Server(self.clock)
        self.seen: list[Delta[Pod]] = []
        self.informer: Informer[Pod] = Informer(
            self.server,  # type: ignore[arg-type]
            PODS,
            clock=self.clock,
            rng=lambda: 0.5,
            timing=Timing(watch_seconds=30, silence_seconds=40),
            optional=optional,
        )
        self.informer.add_handler(self.seen.append)
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.task = asyncio.create_task(self.informer.run())
        await self.clock.advance(0)

    def names(self) -> list[str]:
        return [obj.metadata.name for obj in self.informer.list()]


@pytest.fixture
async def bench() -> AsyncGenerator[Bench, None]:
    made = Bench()
    yield made
    if made.task is not None:
        made.task.cancel()
        with suppress(asyncio.CancelledError):
            await made.task


async def test_list_then_events_reach_cache_and_handlers_in_order(bench: Bench) -> None:
    a = bench.server.write("a")
    assert not bench.informer.has_synced
    await bench.start()
    assert bench.informer.has_synced
    b = bench.server.write("b")
    newer = bench.server.write("a")
    bench.server.remove("b")
    await bench.clock.advance(1)
    assert bench.seen == [Added(a), Added(b), Updated(a, newer), Deleted(bench.server.history[-1].object)]
    assert bench.names() == ["a"]
    assert b.metadata.name == "b"


async def test_watch_that_ends_normally_is_resumed_without_a_list(bench: Bench) -> None:
    await bench.start()
    await bench.clock.advance(100)
    bench.server.write("a")
    await bench.clock.advance(1)
    assert bench.names() == ["a"]
    assert bench.server.lists == 1
    assert bench.server.watches >= 3


@pytest.mark.parametrize("error", [StreamBroken("truncated line"), ConnectionFailed("reset")])
async def test_broken_stream_is_resumed_where_it_stopped(bench: Bench, error: KubeError) -> None:
    await bench.start()
    bench.server.write("a")
    await bench.clock.advance(2)
    bench.server.disturb(error)
    await bench.clock.advance(0)
    bench.server.write("b")
    await bench.clock.advance(2)
    assert bench.names() == ["a", "b"]
    assert bench.server.lists == 1


async def test_stream_that_breaks_again_without_progress_is_listed_anew(bench: Bench) -> None:
    await bench.start()
    bench.server.write("a")
    await bench.clock.advance(2)
    bench.server.disturb(StreamBroken("line too long"))
    await bench.clock.advance(0)
    bench.server.disturb(StreamBroken("line too long"))
    await bench.clock.advance(5)
    assert bench.server.lists == 2


async def test_410_lists_anew_and_finds_the_missed_delete(bench: Bench) -> None:
    bench.server.write("a")
    bench.server.write("b")
    await bench.start()
    bench.seen.clear()
    bench.server.disturb(ConnectionFailed("apiserver restarts"))
    await bench.clock.advance(0)
    # While nobody watches, a pod goes and the history of it is compacted.
    bench.server.remove("a")
    bench.server.history.clear()
    bench.server.compacted = bench.server.version
    await bench.clock.advance(5)
    assert bench.names() == ["b"]
    assert [type(delta) for delta in bench.seen] == [Deleted]


async def test_silent_watch_is_given_up_and_listed_anew(bench: Bench) -> None:
    await bench.start()
    bench.server.silent = True
    bench.server.news.set()
    await bench.clock.advance(1)
    bench.server.write("a")
    await bench.clock.advance(38)
    assert bench.names() == []
    bench.server.silent = False
    await bench.clock.advance(3)
    assert bench.names() == ["a"]
    assert "no event, bookmark or end" in str(bench.informer._last_error)


async def test_unreachable_server_keeps_the_cache_and_backs_off(bench: Bench) -> None:
    bench.server.write("a")
    await bench.start()
    bench.server.list_errors = [ConnectionFailed("refused")] * 1000
    bench.server.disturb(Gone("history lost"))
    before = bench.server.lists
    await bench.clock.advance(300)
    assert bench.names() == ["a"]
    assert not any(isinstance(delta, Deleted) for delta in bench.seen)
    # 300 s at a cap of 10 s, jittered down to half of it, after a few quick tries.
    assert bench.server.lists - before < 60


@pytest.mark.parametrize("error", [Forbidden("RBAC revoked"), NotFound("the CRD is gone")])
async def test_refused_list_deletes_nothing_and_recovers_by_itself(bench: Bench, error: KubeError) -> None:
    bench.server.write("a")
    await bench.start()
    bench.server.list_errors = [error] * 3
    bench.server.disturb(Gone("history lost"))
    await bench.clock.advance(0.01)
    assert bench.names() == ["a"]
    bench.server.write("b")
    await bench.clock.advance(30)
    assert bench.names() == ["a", "b"]


@pytest.mark.parametrize(
    "error", [Forbidden("no right"), NotFound("no such kind"), ServerError("conversion webhook failed", status=500)]
)
async def test_optional_list_that_fails_is_answered_and_comes_later(error: KubeError) -> None:
    """Else jobs that do not need it would wait for it."""
    bench = Bench(optional=True)
    bench.server.write("a")
    bench.server.list_errors = [error] * 3
    await bench.start()
    await asyncio.wait_for(bench.informer.wait_answered(), 5)
    assert (bench.informer.is_refused, bench.informer.refusal) == (True, str(error))
    await bench.clock.advance(30)
    assert not bench.informer.is_refused
    assert bench.names() == ["a"]
    assert bench.task is not None
    bench.task.cancel()


async def test_list_of_a_lagging_server_is_not_believed(bench: Bench) -> None:
    old = bench.server.write("a")
    lagging = ListResult((old,), str(bench.server.version))
    bench.server.write("b")
    await bench.start()
    bench.server.stale_list = lagging
    bench.server.disturb(Gone("another replica answers"))
    await bench.clock.advance(0.15)
    assert bench.names() == ["a", "b"]
    bench.server.stale_list = None
    await bench.clock.advance(30)
    assert bench.names() == ["a", "b"]
    assert not any(isinstance(delta, Deleted) for delta in bench.seen)


async def test_history_that_stays_rewound_is_believed_in_the_end(bench: Bench) -> None:
    old = bench.server.write("a")
    bench.server.write("b")
    await bench.start()
    bench.server.stale_list = ListResult((old,), "1")
    bench.server.disturb(Gone("etcd was restored from a backup"))
    await bench.clock.advance(60)
    assert "a" in bench.names()
    assert any(isinstance(delta, Deleted) and delta.object.metadata.name == "b" for delta in bench.seen)


async def test_handler_that_raises_does_not_stop_the_others(bench: Bench) -> None:
    def poisoned(delta: Delta[Pod]) -> None:
        raise ValueError(delta)

    second: list[Delta[Pod]] = []
    bench.informer.add_handler(poisoned)
    bench.informer.add_handler(second.append)
    await bench.start()
    a = bench.server.write("a")
    await bench.clock.advance(1)
    assert second == [Added(a)]


async def test_handler_added_late_is_told_of_what_exists(bench: Bench) -> None:
    a = bench.server.write("a")
    await bench.start()
    late: list[Delta[Pod]] = []
    bench.informer.add_handler(late.append)
    assert late == [Added(a)]
