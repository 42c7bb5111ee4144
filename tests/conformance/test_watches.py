"""What a watch tells, in which order, and how it ends."""

from __future__ import annotations

import pytest

from everstep_operator.kube.client import Bookmark, Changed, EventType
from everstep_operator.kube.errors import Gone
from everstep_operator.kube.resources import PODS
from support.conformity.bodies import BINDINGS, CONFIGMAPS, JOBS, configmap, job, pod
from support.conformity.world import World


async def test_watch_tells_every_change_in_order(world: World) -> None:
    client, namespace = world.client, world.namespace
    async with world.watching(CONFIGMAPS) as watcher:
        made = await client.create(CONFIGMAPS, namespace, configmap("c"))
        patched = await client.merge_patch(CONFIGMAPS, namespace, "c", {"data": {"a": "1"}})
        await client.delete(CONFIGMAPS, namespace, "c")
        await world.told(watcher, ("ADDED", "c"), ("MODIFIED", "c"), ("DELETED", "c"))
        added, modified, deleted = watcher.changes
    assert added.resource_version == made.metadata.resource_version
    assert modified.resource_version == patched.metadata.resource_version
    assert int(deleted.resource_version) > int(modified.resource_version)
    assert deleted.object.data == {"a": "1"}
    assert {change.object.metadata.uid for change in watcher.changes} == {made.metadata.uid}


async def test_pod_that_goes_at_once_is_marked_first(world: World) -> None:
    async with world.watching(PODS) as watcher:
        await world.client.create(PODS, world.namespace, pod("w"))
        await world.client.patch_status(PODS, world.namespace, "w", {"phase": "Running"})
        await world.client.delete(PODS, world.namespace, "w", grace_seconds=0)
        await world.told(watcher, ("ADDED", "w"), ("MODIFIED", "w"), ("MODIFIED", "w"), ("DELETED", "w"))
    *_, marked, deleted = [change.object.metadata for change in watcher.changes]
    for meta in (marked, deleted):
        assert meta.deletion_timestamp is not None
        assert (meta.deletion_grace_period_seconds, meta.generation) == (0, 2)
    assert watcher.changes[-1].object.status.phase == "Running"


async def test_pod_of_a_kubelet_is_marked_twice(world: World) -> None:
    await world.client.create(PODS, world.namespace, pod("w"))
    binding = {"metadata": {"name": "w"}, "target": {"kind": "Node", "name": "somewhere"}}
    await world.client.create(BINDINGS, world.namespace, binding)
    async with world.watching(PODS) as watcher:
        await world.client.delete(PODS, world.namespace, "w", grace_seconds=7)
        await world.client.delete(PODS, world.namespace, "w", grace_seconds=0)
        await world.told(watcher, ("MODIFIED", "w"), ("MODIFIED", "w"), ("DELETED", "w"))
    graces = [change.object.metadata.deletion_grace_period_seconds for change in watcher.changes]
    assert graces == [7, 0, 0]


async def test_watch_continues_where_a_list_ended(world: World) -> None:
    await world.client.create(CONFIGMAPS, world.namespace, configmap("before"))
    start = (await world.client.list(CONFIGMAPS, world.namespace)).resource_version
    await world.client.create(CONFIGMAPS, world.namespace, configmap("a"))
    await world.client.delete(CONFIGMAPS, world.namespace, "before")
    async with world.watching(CONFIGMAPS, resource_version=start) as watcher:
        await world.client.create(CONFIGMAPS, world.namespace, configmap("b"))
        await world.told(watcher, ("ADDED", "a"), ("DELETED", "before"), ("ADDED", "b"))


async def test_watch_from_an_event_tells_what_came_after_it(world: World) -> None:
    first = await world.client.create(PODS, world.namespace, pod("a"))
    await world.client.create(PODS, world.namespace, pod("b"))
    async with world.watching(PODS, resource_version=first.metadata.resource_version) as watcher:
        await world.told(watcher, ("ADDED", "b"))


async def test_watch_from_zero_tells_what_exists_first(world: World) -> None:
    await world.client.create(PODS, world.namespace, pod("b"))
    await world.client.create(PODS, world.namespace, pod("a"))
    async with world.watching(PODS, resource_version="0") as watcher:
        await world.eventually("both are told", lambda: len(watcher.changes) == 2)
        assert set(watcher.seen()) == {("ADDED", "a"), ("ADDED", "b")}


async def test_watch_is_of_one_namespace_or_of_all(world: World) -> None:
    other = await world.new_namespace()
    async with world.watching(PODS) as mine, world.watching(PODS, None, label_selector="t=w") as everywhere:
        await world.client.create(PODS, other, pod("b", t="w"))
        await world.client.create(PODS, world.namespace, pod("a", t="w"))
        await world.told(everywhere, ("ADDED", "b"), ("ADDED", "a"))
        await world.told(mine, ("ADDED", "a"))


async def test_object_that_leaves_a_selector_is_deleted_for_its_watcher(world: World) -> None:
    client, namespace = world.client, world.namespace
    async with world.watching(CONFIGMAPS, label_selector="job=a") as watcher:
        await client.create(CONFIGMAPS, namespace, configmap("c", {"n": "1"}, job="a"))
        await client.create(CONFIGMAPS, namespace, configmap("d", None, job="b"))
        moved = await client.merge_patch(CONFIGMAPS, namespace, "c", {"metadata": {"labels": {"job": "b"}}})
        back = await client.merge_patch(CONFIGMAPS, namespace, "d", {"metadata": {"labels": {"job": "a"}}})
        await world.told(watcher, ("ADDED", "c"), ("DELETED", "c"), ("ADDED", "d"))
    assert watcher.changes[1].resource_version == moved.metadata.resource_version
    assert watcher.changes[1].object.metadata.labels == {"job": "a"}
    assert watcher.changes[2].resource_version == back.metadata.resource_version


async def test_write_that_changes_nothing_is_not_told(world: World) -> None:
    client, namespace = world.client, world.namespace
    await client.create(CONFIGMAPS, namespace, configmap("c", {"a": "1"}))
    async with world.watching(CONFIGMAPS) as watcher:
        await client.merge_patch(CONFIGMAPS, namespace, "c", {"data": {"a": "1"}})
        await client.create(CONFIGMAPS, namespace, configmap("last"))
        await world.told(watcher, ("ADDED", "last"))


async def test_status_write_of_a_job_is_one_event(world: World) -> None:
    await world.client.create(JOBS, world.namespace, job("j"))
    async with world.watching(JOBS) as watcher:
        await world.client.patch_status(JOBS, world.namespace, "j", {"replicas": 1})
        await world.told(watcher, ("MODIFIED", "j"))
        assert watcher.changes[0].object.status == {"replicas": 1}


async def test_recreated_object_is_deleted_and_added(world: World) -> None:
    old = await world.client.create(CONFIGMAPS, world.namespace, configmap("c"))
    async with world.watching(CONFIGMAPS) as watcher:
        await world.client.delete(CONFIGMAPS, world.namespace, "c")
        new = await world.client.create(CONFIGMAPS, world.namespace, configmap("c"))
        await world.told(watcher, ("DELETED", "c"), ("ADDED", "c"))
    uids = [change.object.metadata.uid for change in watcher.changes]
    assert uids == [old.metadata.uid, new.metadata.uid]


@pytest.mark.long
async def test_watch_ends_by_itself_after_a_bookmark_at_the_newest_version(world: World) -> None:
    for number in range(4):  # an API server does not promise it, and with few processors does not always send one
        async with world.watching(CONFIGMAPS, timeout_seconds=6) as watcher:
            made = await world.client.create(CONFIGMAPS, world.namespace, configmap(f"c{number}"))
            await world.eventually("the watch ended", lambda w=watcher: w.done)  # type: ignore[misc]
        versions = [int(event.resource_version) for event in watcher.events]
        assert versions == sorted(versions)
        assert isinstance(watcher.events[0], Changed)
        if isinstance(watcher.events[-1], Bookmark):
            break
    last = watcher.events[-1]
    assert isinstance(last, Bookmark)
    assert int(last.resource_version) >= int(made.metadata.resource_version)


@pytest.mark.long
async def test_watch_resumed_at_its_bookmark_misses_nothing_and_repeats_nothing(world: World) -> None:
    async with world.watching(CONFIGMAPS, timeout_seconds=6) as watcher:
        await world.client.create(CONFIGMAPS, world.namespace, configmap("a"))
        await world.eventually("the watch ended", lambda: watcher.done)
    await world.client.create(CONFIGMAPS, world.namespace, configmap("b"))
    async with world.watching(CONFIGMAPS, resource_version=watcher.events[-1].resource_version) as resumed:
        await world.told(resumed, ("ADDED", "b"))


async def test_watch_from_a_forgotten_version_is_gone(world: World) -> None:
    version = await world.forgotten_version()
    with pytest.raises(Gone) as caught:
        await anext(world.client.watch(PODS, world.namespace, resource_version=version, timeout_seconds=5))
    assert caught.value.status == 410


@pytest.mark.long_but("apiserver")
async def test_two_watches_are_told_the_same(world: World) -> None:
    async with world.watching(PODS) as one, world.watching(PODS) as two:
        await world.client.create(PODS, world.namespace, pod("w"))
        await world.told(one, ("ADDED", "w"))
        await world.told(two, ("ADDED", "w"))
    assert one.changes[0].object == two.changes[0].object


async def test_deletion_that_waits_is_told_as_a_change_first(world: World) -> None:
    body = {"metadata": {"name": "c", "finalizers": ["everstep.dev/test"]}, "data": {}}
    await world.client.create(CONFIGMAPS, world.namespace, body)
    async with world.watching(CONFIGMAPS) as watcher:
        await world.client.delete(CONFIGMAPS, world.namespace, "c")
        await world.client.merge_patch(CONFIGMAPS, world.namespace, "c", {"metadata": {"finalizers": None}})
        await world.eventually("it is gone", lambda: bool(watcher.seen()) and watcher.seen()[-1][0] == "DELETED")
    assert watcher.changes[0].type is EventType.MODIFIED
    assert watcher.changes[0].object.metadata.deletion_timestamp is not None
