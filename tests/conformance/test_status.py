"""What belongs to the spec, what to the status, and the numbers that tell them apart."""

from __future__ import annotations

import pytest

from everstep_operator.kube.errors import Conflict, Invalid, NotFound
from everstep_operator.kube.resources import PODS
from support.conformity.bodies import CONFIGMAPS, JOBS, configmap, job, pod
from support.conformity.world import World

READY = {
    "type": "Ready",
    "status": "True",
    "reason": "Running",
    "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


async def test_generation_counts_changes_of_the_spec_only(world: World) -> None:
    client, namespace = world.client, world.namespace
    assert (await client.create(JOBS, namespace, job("j"))).metadata.generation == 1
    status = await client.patch_status(JOBS, namespace, "j", {"replicas": 2})
    assert status.metadata.generation == 1
    labelled = await client.merge_patch(JOBS, namespace, "j", {"metadata": {"labels": {"a": "b"}}})
    assert labelled.metadata.generation == 1
    edited = await client.merge_patch(JOBS, namespace, "j", {"spec": {"replicas": 3}})
    assert edited.metadata.generation == 2
    same = await client.merge_patch(JOBS, namespace, "j", {"spec": {"replicas": 3}})
    assert same.metadata.generation == 2


async def test_status_in_a_create_is_ignored(world: World) -> None:
    body = {**job("j"), "status": {"replicas": 9}}
    assert (await world.client.create(JOBS, world.namespace, body)).status == {}
    made = await world.client.create(PODS, world.namespace, {**pod("w"), "status": {"phase": "Running"}})
    assert made.status.phase == "Pending"


async def test_status_in_a_write_of_the_object_is_ignored(world: World) -> None:
    made = await world.client.create(JOBS, world.namespace, job("j"))
    await world.client.patch_status(JOBS, world.namespace, "j", {"replicas": 2})
    patch = {"spec": {"replicas": 4}, "status": {"replicas": 9}}
    patched = await world.client.merge_patch(JOBS, world.namespace, "j", patch)
    assert (patched.spec["replicas"], patched.status) == (4, {"replicas": 2})
    version = patched.metadata.resource_version
    body = {**job("j"), "metadata": {"name": "j", "resourceVersion": version}}
    assert (await world.client.replace(JOBS, world.namespace, "j", body)).status == {"replicas": 2}
    assert made.status == {}


async def test_spec_in_a_write_of_the_status_is_ignored(world: World) -> None:
    await world.client.create(JOBS, world.namespace, job("j"))
    patch = {"spec": {"replicas": 9}, "status": {"replicas": 2}}
    patched = await world.client.merge_patch(JOBS, world.namespace, "j", patch, subresource="status")
    assert (patched.spec["replicas"], patched.status) == (2, {"replicas": 2})
    assert patched.metadata.generation == 1


async def test_labels_in_a_write_of_a_custom_status_are_ignored(world: World) -> None:
    await world.client.create(JOBS, world.namespace, job("j"))
    patch = {"metadata": {"labels": {"a": "b"}}, "status": {"replicas": 2}}
    patched = await world.client.merge_patch(JOBS, world.namespace, "j", patch, subresource="status")
    assert patched.metadata.labels == {}


async def test_spec_of_a_pod_stays_in_a_write_of_its_status(world: World) -> None:
    await world.client.create(PODS, world.namespace, pod("w"))
    patch = {"spec": {"nodeName": "elsewhere"}, "status": {"phase": "Running"}}
    patched = await world.client.merge_patch(PODS, world.namespace, "w", patch, subresource="status")
    assert (patched.spec.node_name, patched.status.phase) == ("", "Running")
    ignored = await world.client.merge_patch(PODS, world.namespace, "w", {"status": {"phase": "Failed"}})
    assert ignored.status.phase == "Running"


async def test_status_patch_merges_and_null_deletes(world: World) -> None:
    await world.client.create(JOBS, world.namespace, job("j"))
    first = {"replicas": 2, "readyReplicas": 1, "progress": {"step": 5}, "conditions": [READY]}
    await world.client.patch_status(JOBS, world.namespace, "j", first)
    second = {"readyReplicas": None, "progress": {"epoch": 1}}
    status = (await world.client.patch_status(JOBS, world.namespace, "j", second)).status
    assert status == {"replicas": 2, "progress": {"step": 5, "epoch": 1}, "conditions": [READY]}


async def test_status_patch_is_a_compare_and_swap(world: World) -> None:
    made = await world.client.create(JOBS, world.namespace, job("j"))
    stale = made.metadata.resource_version
    await world.client.patch_status(JOBS, world.namespace, "j", {"replicas": 1}, resource_version=stale)
    with pytest.raises(Conflict):
        await world.client.patch_status(JOBS, world.namespace, "j", {"replicas": 2}, resource_version=stale)
    assert (await world.client.get(JOBS, world.namespace, "j")).status == {"replicas": 1}


async def test_status_patch_of_a_successor_conflicts(world: World) -> None:
    old = await world.client.create(PODS, world.namespace, pod("w"))
    await world.client.delete(PODS, world.namespace, "w", grace_seconds=0)
    await world.client.create(PODS, world.namespace, pod("w"))
    stale = old.metadata.resource_version
    with pytest.raises(Conflict):
        await world.client.patch_status(PODS, world.namespace, "w", {"phase": "Failed"}, resource_version=stale)


async def test_status_is_held_to_its_schema(world: World) -> None:
    await world.client.create(JOBS, world.namespace, job("j"))
    with pytest.raises(Invalid) as caught:
        await world.client.patch_status(JOBS, world.namespace, "j", {"replicas": "two"})
    assert {cause.field for cause in caught.value.causes} >= {"status.replicas"}
    pruned = await world.client.patch_status(JOBS, world.namespace, "j", {"replicas": 1, "unheardOf": 1})
    assert pruned.status == {"replicas": 1}


async def test_list_by_key_refuses_a_key_twice(world: World) -> None:
    await world.client.create(JOBS, world.namespace, job("j"))
    with pytest.raises(Invalid) as caught:
        await world.client.patch_status(JOBS, world.namespace, "j", {"conditions": [READY, READY]})
    assert [(cause.reason, cause.field) for cause in caught.value.causes] == [
        ("FieldValueDuplicate", "status.conditions[1]")
    ]


async def test_kind_without_a_status_has_no_such_endpoint(world: World) -> None:
    await world.client.create(CONFIGMAPS, world.namespace, configmap("c"))
    with pytest.raises(NotFound):
        await world.client.patch_status(CONFIGMAPS, world.namespace, "c", {"a": "b"})


async def test_scale_reads_and_writes_the_replicas(world: World) -> None:
    client, namespace = world.client, world.namespace
    await client.create(JOBS, namespace, job("j"))
    await client.patch_status(JOBS, namespace, "j", {"replicas": 1, "selector": "a=b"})
    read = await client.merge_patch(JOBS, namespace, "j", {}, subresource="scale")
    assert (read.spec, read.status) == ({"replicas": 2}, {"replicas": 1, "selector": "a=b"})
    written = await client.merge_patch(JOBS, namespace, "j", {"spec": {"replicas": 4}}, subresource="scale")
    assert written.spec == {"replicas": 4}
    found = await client.get(JOBS, namespace, "j")
    assert (found.spec["replicas"], found.metadata.generation) == (4, 2)
    assert found.metadata.resource_version == written.metadata.resource_version


async def test_scale_is_held_to_the_schema_and_the_version(world: World) -> None:
    made = await world.client.create(JOBS, world.namespace, job("j"))
    with pytest.raises(Invalid) as caught:
        await world.client.merge_patch(JOBS, world.namespace, "j", {"spec": {"replicas": 5000}}, subresource="scale")
    assert {cause.field for cause in caught.value.causes} == {"spec.replicas"}
    await world.client.merge_patch(JOBS, world.namespace, "j", {"spec": {"replicas": 3}}, subresource="scale")
    with pytest.raises(Conflict):
        await world.client.merge_patch(
            JOBS,
            world.namespace,
            "j",
            {"spec": {"replicas": 4}},
            subresource="scale",
            resource_version=made.metadata.resource_version,
        )


async def test_pod_has_no_scale(world: World) -> None:
    await world.client.create(PODS, world.namespace, pod("w"))
    with pytest.raises(NotFound):
        await world.client.merge_patch(PODS, world.namespace, "w", {"spec": {"replicas": 1}}, subresource="scale")
