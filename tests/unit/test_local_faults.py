"""Injected faults: each shows what a broken network or server shows, strikes whom it names, repeats with its seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from everstep_local.apiserver.client import MemoryClient
from everstep_local.apiserver.cluster import MemoryCluster
from everstep_local.apiserver.faults import (
    Break,
    Delay,
    Disconnect,
    Drop,
    Duplicate,
    Expire,
    Fault,
    Faults,
    LoseAnswer,
    Refuse,
    Stale,
    Swap,
)
from everstep_local.apiserver.kinds.kind import CONFIG_MAPS
from everstep_operator.kube.client import Changed
from everstep_operator.kube.errors import (
    AlreadyExists,
    ConnectionFailed,
    Gone,
    KubeError,
    NotFound,
    ServerError,
    StreamBroken,
    TooManyRequests,
)
from everstep_operator.kube.resources import NODES, PODS, SERVICES
from everstep_operator.runtime.clock import cancel
from everstep_operator.runtime.informer import Informer
from support.clocks.manual import ManualClock


class Setting:
    """A cluster, an undisturbed client, and one with faults."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.clock = ManualClock()
        self.cluster = MemoryCluster(self.clock)
        self.calm = self.cluster.client()
        self.faults = Faults(rng)
        self.client: MemoryClient = self.cluster.client(faults=self.faults)

    async def make(self, *names: str) -> None:
        for name in names:
            await self.calm.create(PODS, "default", pod(name))

    async def names(self) -> list[str]:
        return [one.metadata.name for one in (await self.client.list(PODS, "default")).items]

    async def watched(self, count: int, act: Callable[[], Any]) -> list[str]:
        """The names of the first `count` events of the disturbed client's watch, beginning before `act`."""
        start = self.cluster.resource_version
        found: list[str] = []
        async with aclosing(self.client.watch(PODS, "default", resource_version=start, timeout_seconds=10)) as stream:

            async def follow() -> None:
                async for event in stream:
                    if isinstance(event, Changed):
                        found.append(event.object.metadata.name)
                    if len(found) == count:
                        return

            following = asyncio.create_task(follow())
            try:
                await act()
                await self.clock.advance(11)
                await following
            finally:
                await cancel(following)
        return found


def pod(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"containers": [{"name": "worker", "image": "none"}]}}


async def test_refusal_is_of_the_servers_class_and_does_nothing() -> None:
    setting = Setting()
    setting.faults.add(Refuse(429, "TooManyRequests", retry_after=3), "create", times=1)
    with pytest.raises(TooManyRequests) as caught:
        await setting.client.create(PODS, "default", pod("a"))
    assert caught.value.retry_after == 3
    assert await setting.names() == []
    setting.faults.add(Refuse(500), "get", times=1)
    with pytest.raises(ServerError):
        await setting.client.get(PODS, "default", "a")
    with pytest.raises(NotFound):
        await setting.client.get(PODS, "default", "a")


async def test_rule_strikes_only_what_it_names_after_what_it_skips() -> None:
    setting = Setting()
    rule = setting.faults.add(Disconnect(), "create", resource=PODS, name="b", skip=1, times=1)
    await setting.client.create(PODS, "default", pod("b"))
    service = {"metadata": {"name": "b"}, "spec": {"clusterIP": "None"}}
    await setting.client.create(SERVICES, "default", service)
    await setting.client.create(PODS, "default", pod("c"))
    with pytest.raises(ConnectionFailed):
        await setting.client.create(PODS, "default", pod("b"))
    assert rule.struck == 1
    with pytest.raises(AlreadyExists):
        await setting.client.create(PODS, "default", pod("b"))


@pytest.mark.parametrize("verb", ["create", "patch", "delete", "replace"])
async def test_lost_answer_follows_a_write_that_happened(verb: str) -> None:
    setting = Setting()
    client = setting.client
    if verb != "create":
        await setting.calm.create(CONFIG_MAPS, "default", {"metadata": {"name": "a"}})
    before = int(setting.cluster.resource_version)
    setting.faults.add(LoseAnswer(), verb, times=1)
    labels = {"labels": {"x": "y"}}
    calls = {
        "create": lambda: client.create(CONFIG_MAPS, "default", {"metadata": {"name": "a"}}),
        "patch": lambda: client.merge_patch(CONFIG_MAPS, "default", "a", {"metadata": labels}),
        "delete": lambda: client.delete(CONFIG_MAPS, "default", "a"),
        "replace": lambda: client.replace(CONFIG_MAPS, "default", "a", {"metadata": {"name": "a", **labels}}),
    }  # fmt: skip
    with pytest.raises(ConnectionFailed, match="the answer was lost"):
        await calls[verb]()
    assert int(setting.cluster.resource_version) == before + 1


async def test_refused_write_whose_answer_would_be_lost_is_refused() -> None:
    setting = Setting()
    await setting.make("a")
    setting.faults.add(LoseAnswer(), "create")
    with pytest.raises(AlreadyExists):
        await setting.client.create(PODS, "default", pod("a"))


async def test_delay_takes_time_of_the_clusters_clock() -> None:
    setting = Setting()
    setting.faults.add(Delay(5), "get", "create")
    creating = asyncio.create_task(setting.client.create(PODS, "default", pod("a")))
    await setting.clock.advance(4.9)
    assert not creating.done()
    await setting.clock.advance(0.2)
    assert creating.done()
    assert (await creating).metadata.name == "a"


async def test_stale_read_is_a_state_that_was() -> None:
    setting = Setting()
    await setting.make("a", "b")
    await setting.calm.delete(PODS, "default", "a")
    version = int(setting.cluster.resource_version)
    rule = setting.faults.add(Stale(1))
    assert await setting.names() == ["a", "b"]
    assert (await setting.client.get(PODS, "default", "a")).metadata.name == "a"
    assert int((await setting.client.list(PODS)).resource_version) == version - 1
    setting.faults.remove(rule)
    assert await setting.names() == ["b"]
    setting.faults.add(Stale(3))  # the pod was marked before it went
    assert await setting.names() == ["a"]
    setting.cluster.compact()
    assert await setting.names() == ["b"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Drop(), ["a", "c"]),
        (Duplicate(), ["a", "b", "b", "c"]),
        (Swap(), ["a", "c", "b"]),
        (Delay(3), ["a", "b", "c"]),
    ],
    ids=["dropped", "duplicated", "reordered", "delayed"],
)
async def test_event_of_a_watch_is_disturbed_alone(fault: Fault, expected: list[str]) -> None:
    setting = Setting()
    setting.faults.add(fault, "event", name="b")

    async def act() -> None:
        await setting.make("a", "b", "c")

    assert await setting.watched(len(expected), act) == expected


async def test_event_that_is_held_back_comes_at_the_latest_with_the_end() -> None:
    setting = Setting()
    setting.faults.add(Swap(), "event")

    async def act() -> None:
        await setting.make("a")

    assert await setting.watched(1, act) == ["a"]


@pytest.mark.parametrize(
    ("fault", "error"),
    [(Break(), StreamBroken), (Disconnect(), ConnectionFailed), (Expire(), Gone)],
    ids=["broken", "disconnected", "expired"],
)
async def test_watch_fails_at_the_event_with_the_right_error(fault: Fault, error: type[KubeError]) -> None:
    setting = Setting()
    setting.faults.add(fault, "event", name="b", times=1)
    found: list[str] = []

    async def act() -> None:
        await setting.make("a", "b", "c")

    start = setting.cluster.resource_version
    await act()

    async def follow() -> None:
        async for event in setting.client.watch(PODS, "default", resource_version=start):
            assert isinstance(event, Changed)
            found.append(event.object.metadata.name)

    with pytest.raises(error):
        await follow()
    assert found == ["a"]


async def test_cut_breaks_open_watches_and_every_request_until_healed() -> None:
    setting = Setting()
    await setting.make("a")
    stream = setting.client.watch(PODS, "default", resource_version="0")
    async with aclosing(stream):
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await setting.clock.advance(1)
        setting.faults.cut()
        with pytest.raises(ConnectionFailed):
            await waiting
    for request in (setting.names(), setting.client.review_token("x", ["y"])):
        with pytest.raises(ConnectionFailed):
            await request
    setting.faults.heal()
    assert await setting.names() == ["a"]


async def test_fault_at_the_wrong_place_is_told() -> None:
    setting = Setting()
    setting.faults.add(Drop(), "get")
    with pytest.raises(ValueError, match="add it for the verb 'event'"):
        await setting.client.get(PODS, "default", "a")
    with pytest.raises(ValueError, match="chance"):
        setting.faults.add(Drop(), "event", chance=0.5)


async def outcomes(seed: int) -> list[str]:
    setting = Setting(random.Random(seed))
    setting.faults.add(Refuse(500), "create", chance=0.3)
    setting.faults.add(LoseAnswer(), "create", chance=0.3)
    found = []
    for number in range(40):
        try:
            await setting.client.create(PODS, "default", pod(f"w{number}"))
            found.append("created")
        except KubeError as error:
            found.append(type(error).__name__)
    return found


async def test_chance_repeats_with_its_seed() -> None:
    assert await outcomes(1) == await outcomes(1)
    assert await outcomes(1) != await outcomes(2)
    assert {"created", "ServerError", "ConnectionFailed"} == set(await outcomes(1))


@pytest.mark.parametrize("seed", range(5))
async def test_informer_behind_a_bad_network_ends_with_the_truth(seed: int) -> None:
    """Lost events are repaired only by a new list, hence no Drop: the server does not lose events."""
    rng = random.Random(seed)
    setting = Setting(rng)
    for fault, chance in (
        (Duplicate(), 0.2),
        (Break(), 0.1),
        (Disconnect(), 0.05),
        (Expire(), 0.05),
        (Delay(0.5), 0.2),
    ):
        setting.faults.add(fault, "event", chance=chance)
    setting.faults.add(Refuse(500), "list", "watch", chance=0.2)
    setting.faults.add(Stale(3), "list", chance=0.2)
    informer = Informer(setting.client, PODS, clock=setting.clock, rng=rng.random)
    running = asyncio.create_task(informer.run())
    try:
        for number in range(60):
            await setting.make(f"w{number}")
            if rng.random() < 0.5:
                name = rng.choice((await setting.calm.list(PODS, "default")).items).metadata.name
                await setting.calm.delete(PODS, "default", name)
            await setting.clock.advance(rng.random())
            if number % 20 == 19:
                setting.cluster.compact()
        setting.faults.rules.clear()
        await setting.clock.advance(60)
        truth = [one.metadata.uid for one in (await setting.calm.list(PODS, "default")).items]
        assert sorted(one.metadata.uid for one in informer.list("default")) == sorted(truth)
        assert not running.done()
    finally:
        await cancel(running)


async def test_watch_that_is_closed_leaves_nothing_behind() -> None:
    setting = Setting()
    before = len(asyncio.all_tasks())
    for _ in range(3):
        stream = setting.client.watch(NODES, resource_version="0")
        waiting = asyncio.ensure_future(anext(stream))
        await setting.clock.advance(1)
        await cancel(waiting)
        await stream.aclose()
    assert len(asyncio.all_tasks()) == before
    assert setting.faults._listeners == []
