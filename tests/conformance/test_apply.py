"""Server-side apply: whose a field is, and what happens to it."""

from __future__ import annotations

from typing import Any

import pytest
from conformity.bodies import CONFIGMAPS, JOBS, configmap, job
from conformity.world import World

from everstep_operator.kube.errors import Conflict, Invalid, NotFound
from everstep_operator.kube.resources import SERVICES


def condition(kind: str, status: str) -> dict[str, str]:
    words = {"reason": "Because", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {"type": kind, "status": status, **words}


async def apply(world: World, body: dict[str, Any], manager: str, *, force: bool = False) -> Any:
    return await world.client.apply(CONFIGMAPS, world.namespace, "c", body, field_manager=manager, force=force)


def labelled(**labels: str) -> dict[str, Any]:
    return {"metadata": {"labels": labels}}


async def test_apply_creates_and_applied_again_writes_nothing(world: World) -> None:
    made = await apply(world, labelled(owner="me"), "me")
    assert (made.metadata.name, made.metadata.labels) == ("c", {"owner": "me"})
    again = await apply(world, labelled(owner="me"), "me")
    assert again.metadata.resource_version == made.metadata.resource_version


async def test_apply_conflicts_over_a_field_of_another_manager(world: World) -> None:
    await apply(world, labelled(owner="me", mine="1"), "me")
    with pytest.raises(Conflict) as caught:
        await apply(world, labelled(owner="them", mine="2", new="1"), "them")
    causes = sorted((cause.reason, cause.field) for cause in caught.value.causes)
    assert causes == [
        ("FieldManagerConflict", ".metadata.labels.mine"),
        ("FieldManagerConflict", ".metadata.labels.owner"),
    ]
    assert 'conflicts with "me"' in caught.value.message
    assert (await world.client.get(CONFIGMAPS, world.namespace, "c")).metadata.labels == {"owner": "me", "mine": "1"}


async def test_force_takes_the_field_and_its_ownership(world: World) -> None:
    await apply(world, labelled(owner="me"), "me")
    forced = await apply(world, labelled(owner="them"), "them", force=True)
    assert forced.metadata.labels == {"owner": "them"}
    with pytest.raises(Conflict, match='conflict with "them"'):
        await apply(world, labelled(owner="me"), "me")


async def test_field_that_is_applied_no_more_is_removed(world: World) -> None:
    await apply(world, {**labelled(a="1", b="1"), "data": {"x": "1", "y": "1"}}, "me")
    less = await apply(world, {**labelled(a="1"), "data": {"y": "1"}}, "me")
    assert (less.metadata.labels, less.data) == ({"a": "1"}, {"y": "1"})
    read = await world.client.get(CONFIGMAPS, world.namespace, "c")
    assert read.metadata.resource_version == less.metadata.resource_version
    none = await apply(world, {"metadata": {}}, "me")
    assert (none.metadata.labels, none.data) == ({}, {})


async def test_field_of_two_managers_stays_until_both_leave_it_out(world: World) -> None:
    await apply(world, labelled(shared="1", mine="1"), "me")
    await apply(world, labelled(shared="1"), "them")
    left = await apply(world, labelled(mine="1"), "me")
    assert left.metadata.labels == {"shared": "1", "mine": "1"}
    gone = await apply(world, {"metadata": {}}, "them")
    assert gone.metadata.labels == {"mine": "1"}


async def test_field_of_another_manager_stays(world: World) -> None:
    await apply(world, labelled(a="1"), "me")
    await apply(world, labelled(b="1"), "them")
    changed = await apply(world, labelled(a="2"), "me")
    assert changed.metadata.labels == {"a": "2", "b": "1"}


async def test_update_takes_the_fields_that_it_changes(world: World) -> None:
    await apply(world, labelled(a="1", b="1"), "me")
    await world.client.merge_patch(CONFIGMAPS, world.namespace, "c", labelled(a="2"), field_manager="kubectl-edit")
    with pytest.raises(Conflict) as caught:
        await apply(world, labelled(a="1", b="1"), "me")
    assert [cause.field for cause in caught.value.causes] == [".metadata.labels.a"]
    same = await apply(world, labelled(a="2", b="1"), "me")
    assert same.metadata.labels == {"a": "2", "b": "1"}


async def test_apply_over_an_object_that_was_created_conflicts(world: World) -> None:
    await world.client.create(CONFIGMAPS, world.namespace, configmap("c", {"x": "1"}, a="1"))
    with pytest.raises(Conflict):
        await apply(world, labelled(a="2"), "me")
    added = await apply(world, labelled(b="1"), "me")
    assert added.metadata.labels == {"a": "1", "b": "1"}


async def test_apply_with_an_old_version_conflicts(world: World) -> None:
    made = await apply(world, labelled(a="1"), "me")
    await apply(world, labelled(a="2"), "me")
    body = {"metadata": {"labels": {"a": "3"}, "resourceVersion": made.metadata.resource_version}}
    with pytest.raises(Conflict):
        await apply(world, body, "me")


async def test_apply_is_validated_and_defaulted(world: World) -> None:
    with pytest.raises(Invalid):
        await world.client.apply(
            JOBS, world.namespace, "j", {"spec": job("j", {"replicas": 0})["spec"]}, field_manager="me"
        )
    made = await world.client.apply(JOBS, world.namespace, "j", {"spec": job("j")["spec"]}, field_manager="me")
    assert made.spec["recovery"]["noProgressLimit"] == 3
    assert made.metadata.generation == 1
    again = await world.client.apply(JOBS, world.namespace, "j", {"spec": job("j")["spec"]}, field_manager="me")
    assert again.metadata.resource_version == made.metadata.resource_version
    scaled = await world.client.apply(
        JOBS, world.namespace, "j", {"spec": job("j", {"replicas": 3})["spec"]}, field_manager="me"
    )
    assert (scaled.spec["replicas"], scaled.metadata.generation) == (3, 2)


async def test_conditions_of_two_managers_merge_by_type(world: World) -> None:
    await world.client.create(JOBS, world.namespace, job("j"))

    async def write(manager: str, *conditions: dict[str, str]) -> list[tuple[str, str]]:
        body = {"status": {"conditions": list(conditions)}}
        made = await world.client.apply(JOBS, world.namespace, "j", body, field_manager=manager, subresource="status")
        return [(one["type"], one["status"]) for one in made.status.get("conditions", ())]

    assert await write("a", condition("Ready", "True")) == [("Ready", "True")]
    assert sorted(await write("b", condition("Failed", "False"))) == [("Failed", "False"), ("Ready", "True")]
    assert sorted(await write("a", condition("Ready", "False"))) == [("Failed", "False"), ("Ready", "False")]
    assert await write("a") == [("Failed", "False")]


async def test_apply_of_the_status_leaves_the_spec(world: World) -> None:
    await world.client.create(JOBS, world.namespace, job("j"))
    body = {"spec": {"replicas": 9}, "status": {"replicas": 2}}
    made = await world.client.apply(JOBS, world.namespace, "j", body, field_manager="a", subresource="status")
    assert (made.spec["replicas"], made.status) == (2, {"replicas": 2})
    with pytest.raises(NotFound):
        await world.client.apply(JOBS, world.namespace, "k", body, field_manager="a", subresource="status")


async def test_ports_of_a_service_merge_by_number(world: World) -> None:
    async def write(manager: str, *ports: dict[str, Any]) -> Any:
        body = {"spec": {"selector": {"a": "b"}, "ports": list(ports)}}
        return await world.client.apply(SERVICES, world.namespace, "s", body, field_manager=manager)

    http, grpc = {"name": "http", "port": 80}, {"name": "grpc", "port": 90}
    await write("a", http)
    both = await write("b", grpc)
    assert {one.name for one in both.spec.ports} == {"http", "grpc"}
    one = await write("b", {"name": "grpc", "port": 91})
    assert {(port.name, port.port) for port in one.spec.ports} == {("http", 80), ("grpc", 91)}


async def test_apply_needs_a_manager(world: World) -> None:
    with pytest.raises(Invalid):
        await apply(world, labelled(a="1"), "")
