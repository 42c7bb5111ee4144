"""Deletion: preconditions, finalizers, the grace of pods, and what goes with its owner."""

from __future__ import annotations

import pytest

from everstep_operator.kube.errors import Conflict, Invalid, NotFound
from everstep_operator.kube.resources import PODS
from support.conformity.bodies import BINDINGS, CONFIGMAPS, JOBS, NAMESPACES, NO_UID, configmap, job, owner, pod
from support.conformity.world import World

FINALIZER = "everstep.dev/test"


async def bind(world: World, name: str, node: str = "somewhere") -> None:
    await world.client.create(
        BINDINGS, world.namespace, {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
    )


async def test_deleted_object_is_gone_and_its_name_is_free(world: World) -> None:
    made = await world.client.create(CONFIGMAPS, world.namespace, configmap("c"))
    await world.client.delete(CONFIGMAPS, world.namespace, "c", uid=made.metadata.uid)
    with pytest.raises(NotFound):
        await world.client.get(CONFIGMAPS, world.namespace, "c")
    with pytest.raises(NotFound):
        await world.client.delete(CONFIGMAPS, world.namespace, "c")
    again = await world.client.create(CONFIGMAPS, world.namespace, configmap("c"))
    assert again.metadata.uid != made.metadata.uid


async def test_delete_of_another_uid_or_version_leaves_the_object(world: World) -> None:
    made = await world.client.create(CONFIGMAPS, world.namespace, configmap("c"))
    with pytest.raises(Conflict, match="UID"):
        await world.client.delete(CONFIGMAPS, world.namespace, "c", uid=NO_UID)
    with pytest.raises(Conflict, match="ResourceVersion"):
        await world.client.delete(CONFIGMAPS, world.namespace, "c", uid=made.metadata.uid, resource_version="1")
    assert (await world.client.get(CONFIGMAPS, world.namespace, "c")).metadata == made.metadata


async def test_finalizer_holds_an_object_until_it_is_removed(world: World) -> None:
    body = {**job("j"), "metadata": {"name": "j", "finalizers": [FINALIZER]}}
    made = await world.client.create(JOBS, world.namespace, body)
    await world.client.delete(JOBS, world.namespace, "j")
    held = await world.client.get(JOBS, world.namespace, "j")
    assert held.metadata.deletion_timestamp is not None
    assert held.metadata.deletion_grace_period_seconds == 0
    assert held.metadata.generation == made.metadata.generation + 1
    await world.client.delete(JOBS, world.namespace, "j")
    again = await world.client.get(JOBS, world.namespace, "j")
    assert again.metadata.deletion_timestamp == held.metadata.deletion_timestamp
    await world.client.merge_patch(JOBS, world.namespace, "j", {"metadata": {"finalizers": None}})
    with pytest.raises(NotFound):
        await world.client.get(JOBS, world.namespace, "j")


async def test_object_that_is_being_deleted_takes_status_but_no_new_finalizer(world: World) -> None:
    body = {**job("j"), "metadata": {"name": "j", "finalizers": [FINALIZER]}}
    await world.client.create(JOBS, world.namespace, body)
    await world.client.delete(JOBS, world.namespace, "j")
    assert (await world.client.patch_status(JOBS, world.namespace, "j", {"replicas": 1})).status == {"replicas": 1}
    with pytest.raises(Invalid) as caught:
        await world.client.merge_patch(
            JOBS, world.namespace, "j", {"metadata": {"finalizers": [FINALIZER, "everstep.dev/more"]}}
        )
    assert {cause.field for cause in caught.value.causes} == {"metadata.finalizers"}
    await world.client.merge_patch(JOBS, world.namespace, "j", {"metadata": {"finalizers": []}})
    await world.gone(JOBS, "j")


async def test_deletion_timestamp_is_not_a_clients_to_take_back(world: World) -> None:
    body = {**configmap("c"), "metadata": {"name": "c", "finalizers": [FINALIZER]}}
    await world.client.create(CONFIGMAPS, world.namespace, body)
    await world.client.delete(CONFIGMAPS, world.namespace, "c")
    await world.client.merge_patch(CONFIGMAPS, world.namespace, "c", {"metadata": {"deletionTimestamp": None}})
    assert (await world.client.get(CONFIGMAPS, world.namespace, "c")).metadata.deletion_timestamp is not None
    await world.client.merge_patch(CONFIGMAPS, world.namespace, "c", {"metadata": {"finalizers": None}})


async def test_pod_without_a_node_goes_at_once(world: World) -> None:
    await world.client.create(PODS, world.namespace, pod("w"))
    await world.client.delete(PODS, world.namespace, "w")
    with pytest.raises(NotFound):
        await world.client.get(PODS, world.namespace, "w")


async def test_pod_on_a_node_stays_until_its_kubelet_deletes_it(world: World) -> None:
    body = pod("w")
    body["spec"]["terminationGracePeriodSeconds"] = 25
    made = await world.client.create(PODS, world.namespace, body)
    await bind(world, "w")
    assert (await world.client.get(PODS, world.namespace, "w")).spec.node_name == "somewhere"
    await world.client.delete(PODS, world.namespace, "w", uid=made.metadata.uid)
    dying = (await world.client.get(PODS, world.namespace, "w")).metadata
    assert dying.deletion_timestamp is not None
    assert dying.deletion_grace_period_seconds == 25
    await world.client.delete(PODS, world.namespace, "w")
    assert (await world.client.get(PODS, world.namespace, "w")).metadata.resource_version == dying.resource_version
    await world.client.delete(PODS, world.namespace, "w", uid=made.metadata.uid, grace_seconds=0)
    with pytest.raises(NotFound):
        await world.client.get(PODS, world.namespace, "w")


async def test_grace_of_a_pod_can_only_become_shorter(world: World) -> None:
    await world.client.create(PODS, world.namespace, pod("w"))
    await bind(world, "w")
    await world.client.delete(PODS, world.namespace, "w", grace_seconds=20)
    first = (await world.client.get(PODS, world.namespace, "w")).metadata
    await world.client.delete(PODS, world.namespace, "w", grace_seconds=100)
    assert (await world.client.get(PODS, world.namespace, "w")).metadata.deletion_grace_period_seconds == 20
    await world.client.delete(PODS, world.namespace, "w", grace_seconds=5)
    second = (await world.client.get(PODS, world.namespace, "w")).metadata
    assert second.deletion_grace_period_seconds == 5
    assert first.deletion_timestamp is not None
    assert second.deletion_timestamp is not None
    assert second.deletion_timestamp < first.deletion_timestamp
    await world.client.delete(PODS, world.namespace, "w", grace_seconds=0)
    await world.gone(PODS, "w")


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_pod_that_has_ended_goes_at_once(world: World, phase: str) -> None:
    await world.client.create(PODS, world.namespace, pod("w"))
    await bind(world, "w")
    await world.client.patch_status(PODS, world.namespace, "w", {"phase": phase})
    await world.client.delete(PODS, world.namespace, "w")
    await world.gone(PODS, "w")


async def test_pod_that_ends_while_it_is_deleted_waits_for_its_kubelet_all_the_same(world: World) -> None:
    await world.client.create(PODS, world.namespace, pod("w"))
    await bind(world, "w")
    await world.client.delete(PODS, world.namespace, "w", grace_seconds=20)
    await world.client.patch_status(PODS, world.namespace, "w", {"phase": "Succeeded"})
    await world.client.delete(PODS, world.namespace, "w", grace_seconds=5)
    assert (await world.client.get(PODS, world.namespace, "w")).metadata.deletion_grace_period_seconds == 5
    await world.client.delete(PODS, world.namespace, "w", grace_seconds=0)
    await world.gone(PODS, "w")


async def test_pod_is_bound_once(world: World) -> None:
    await world.client.create(PODS, world.namespace, pod("w"))
    await bind(world, "w")
    bound = await world.client.get(PODS, world.namespace, "w")
    assert [c.status for c in bound.status.conditions if c.type == "PodScheduled"] == ["True"]
    with pytest.raises(Conflict):
        await bind(world, "w", "elsewhere")
    with pytest.raises(NotFound):
        await bind(world, "nobody")
    assert (await world.client.get(PODS, world.namespace, "w")).spec.node_name == "somewhere"
    await world.client.delete(PODS, world.namespace, "w", grace_seconds=0)


async def test_dependents_go_with_their_owner(world: World) -> None:
    parent = await world.client.create(CONFIGMAPS, world.namespace, configmap("parent"))
    for name in ("a", "b"):
        body = configmap(name)
        body["metadata"]["ownerReferences"] = [owner("ConfigMap", parent)]
        made = await world.client.create(CONFIGMAPS, world.namespace, body)
        assert made.metadata.owner_references[0].uid == parent.metadata.uid
    await world.client.delete(CONFIGMAPS, world.namespace, "parent", propagation="Background")
    await world.gone(CONFIGMAPS, "a")
    await world.gone(CONFIGMAPS, "b")


async def test_grandchildren_go_too(world: World) -> None:
    parent = await world.client.create(CONFIGMAPS, world.namespace, configmap("parent"))
    for name in ("child", "grandchild"):
        body = configmap(name)
        body["metadata"]["ownerReferences"] = [owner("ConfigMap", parent)]
        parent = await world.client.create(CONFIGMAPS, world.namespace, body)
    await world.client.delete(CONFIGMAPS, world.namespace, "parent")
    await world.gone(CONFIGMAPS, "grandchild")


async def test_dependent_with_an_owner_left_stays_and_loses_the_reference(world: World) -> None:
    one = await world.client.create(CONFIGMAPS, world.namespace, configmap("one"))
    two = await world.client.create(CONFIGMAPS, world.namespace, configmap("two"))
    body = configmap("child")
    body["metadata"]["ownerReferences"] = [owner("ConfigMap", one), owner("ConfigMap", two)]
    await world.client.create(CONFIGMAPS, world.namespace, body)
    await world.client.delete(CONFIGMAPS, world.namespace, "one")

    async def freed() -> bool:
        child = await world.client.get(CONFIGMAPS, world.namespace, "child")
        return [reference.name for reference in child.metadata.owner_references] == ["two"]

    await world.eventually("the reference is gone", freed)


async def test_object_of_an_owner_that_never_was_is_collected(world: World) -> None:
    parent = await world.client.create(CONFIGMAPS, world.namespace, configmap("parent"))
    body = configmap("child")
    body["metadata"]["ownerReferences"] = [{**owner("ConfigMap", parent), "uid": NO_UID}]
    await world.client.create(CONFIGMAPS, world.namespace, body)
    await world.gone(CONFIGMAPS, "child")
    assert (await world.client.get(CONFIGMAPS, world.namespace, "parent")).metadata.uid == parent.metadata.uid


async def test_dependents_of_an_owner_that_orphans_stay(world: World) -> None:
    parent = await world.client.create(CONFIGMAPS, world.namespace, configmap("parent"))
    body = configmap("child")
    body["metadata"]["ownerReferences"] = [owner("ConfigMap", parent)]
    await world.client.create(CONFIGMAPS, world.namespace, body)
    await world.client.delete(CONFIGMAPS, world.namespace, "parent", propagation="Orphan")
    await world.gone(CONFIGMAPS, "parent")
    child = await world.client.get(CONFIGMAPS, world.namespace, "child")
    assert child.metadata.owner_references == ()
    assert child.metadata.deletion_timestamp is None


async def test_owner_without_a_uid_is_refused(world: World) -> None:
    body = configmap("child")
    body["metadata"]["ownerReferences"] = [{"apiVersion": "v1", "kind": "ConfigMap", "name": "a"}]
    with pytest.raises(Invalid) as caught:
        await world.client.create(CONFIGMAPS, world.namespace, body)
    assert {cause.field for cause in caught.value.causes} == {"metadata.ownerReferences.uid"}


async def test_two_controllers_are_refused(world: World) -> None:
    one = await world.client.create(CONFIGMAPS, world.namespace, configmap("one"))
    two = await world.client.create(CONFIGMAPS, world.namespace, configmap("two"))
    body = configmap("child")
    body["metadata"]["ownerReferences"] = [{**owner("ConfigMap", of), "controller": True} for of in (one, two)]
    with pytest.raises(Invalid) as caught:
        await world.client.create(CONFIGMAPS, world.namespace, body)
    assert {cause.field for cause in caught.value.causes} == {"metadata.ownerReferences"}


@pytest.mark.long
async def test_namespace_goes_with_all_that_is_in_it(world: World) -> None:
    place = await world.new_namespace()
    await world.client.create(CONFIGMAPS, place, configmap("c"))
    await world.client.create(PODS, place, pod("w"))
    await world.client.create(JOBS, place, job("j"))
    await world.client.delete(NAMESPACES, None, place)
    await world.gone(NAMESPACES, place, None)
    for resource in (CONFIGMAPS, PODS, JOBS):
        assert (await world.client.list(resource, place)).items == ()
