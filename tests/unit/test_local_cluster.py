"""The in-memory cluster by itself: what a simulation builds on and a real API server cannot show."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest

from everstep_local.apiserver.cluster import MemoryCluster
from everstep_operator.kube.client import EventType, KubeClient, TokenIdentity, TokenRefused
from everstep_operator.kube.errors import Gone
from everstep_operator.kube.resources import PODS
from support.clocks.manual import ManualClock


def pod(name: str, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [{"name": "worker", "image": "none"}]},
    }


async def history(seed: int) -> list[Any]:
    """All that a watcher sees of a fixed run."""
    clock = ManualClock()
    cluster = MemoryCluster(clock, seed=seed)
    client: KubeClient = cluster.client()
    for number in range(5):
        await client.create(PODS, "default", {**pod("w"), "metadata": {"generateName": "w-"}})
        await clock.advance(number)
    for one in (await client.list(PODS, "default")).items[::2]:
        await client.delete(PODS, "default", one.metadata.name)
    seen = []
    async with aclosing(client.watch(PODS, "default", resource_version="1", timeout_seconds=5)) as stream:
        async for event in stream:
            seen.append(event)
            if len(seen) == 8:
                return seen
    raise AssertionError("eight events were expected")


async def test_same_seed_and_clock_give_the_same_history() -> None:
    assert await history(7) == await history(7)
    assert await history(7) != await history(8)


async def test_two_clients_are_two_watchers_of_the_same_objects() -> None:
    cluster = MemoryCluster(ManualClock())
    one, two = cluster.client(), cluster.client()
    made = await one.create(PODS, "default", pod("w0"))
    assert await two.get(PODS, "default", "w0") is made
    async with aclosing(two.watch(PODS, resource_version="0")) as stream:
        event = await anext(stream)
    assert getattr(event, "type", None) is EventType.ADDED


async def test_history_is_bounded_and_forgets_into_410() -> None:
    cluster = MemoryCluster(ManualClock(), history=10)
    client = cluster.client()
    start = cluster.resource_version
    for number in range(20):
        await client.create(PODS, "default", pod(f"w{number}"))
    with pytest.raises(Gone):
        await anext(client.watch(PODS, "default", resource_version=start))


async def test_changing_a_body_after_the_write_changes_nothing_stored() -> None:
    client = MemoryCluster(ManualClock()).client()
    body = pod("w0", job="a")
    await client.create(PODS, "default", body)
    body["metadata"]["labels"]["job"] = "b"
    assert (await client.get(PODS, "default", "w0")).metadata.labels == {"job": "a"}


async def test_token_ends_with_its_time_and_with_its_pod() -> None:
    clock = ManualClock()
    cluster = MemoryCluster(clock)
    client = cluster.client()
    uid = (await client.create(PODS, "default", pod("w0"))).metadata.uid
    token = cluster.issue_token("default", "default", "w0", uid, "everstep", 600)
    identity = await client.review_token(token, ["other", "everstep"])
    assert identity == TokenIdentity("system:serviceaccount:default:default", ("everstep",), "w0", uid)
    forged = token[:-6] + "AAAAA="
    assert isinstance(await client.review_token(forged, ["everstep"]), TokenRefused)
    assert isinstance(await client.review_token(token, ["other"]), TokenRefused)
    await clock.advance(601)
    assert isinstance(await client.review_token(token, ["everstep"]), TokenRefused)
    fresh = cluster.issue_token("default", "default", "w0", uid, "everstep", 600)
    await client.delete(PODS, "default", "w0")
    await client.create(PODS, "default", pod("w0"))
    assert isinstance(await client.review_token(fresh, ["everstep"]), TokenRefused)
