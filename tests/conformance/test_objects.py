"""Creating, reading, replacing and patching objects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everstep_operator.kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, KubeError, NotFound, ServerError
from everstep_operator.kube.resources import EVENTS, LEASES, NODES, PODS, SERVICES, Resource, custom_resource
from everstep_operator.kube.wire import Unstructured
from support.conformity.bodies import CONFIGMAPS, JOBS, NAMESPACES, NO_UID, SECRETS, configmap, job, pod
from support.conformity.world import World


def fields(error: pytest.ExceptionInfo[KubeError]) -> set[str]:
    return {cause.field for cause in error.value.causes}


def plain(resource: Resource[Any]) -> Resource[Unstructured]:
    """The same, with all fields as JSON: the operator's own types have only those that it reads."""
    return replace(resource, struct=Unstructured)


async def test_created_object_has_the_servers_metadata(world: World) -> None:
    made = await world.client.create(plain(PODS), world.namespace, pod("w0", job="j"))
    meta = made.metadata
    assert (meta.name, meta.namespace, meta.labels) == ("w0", world.namespace, {"job": "j"})
    assert len(meta.uid) == 36
    assert meta.creation_timestamp is not None
    assert int(meta.resource_version) > 0
    assert meta.generation == 1
    assert made.spec["restartPolicy"] == "Always"
    assert made.status["phase"] == "Pending"
    assert (await world.client.get(PODS, world.namespace, "w0")).metadata == meta


async def test_what_is_not_there_is_not_found(world: World) -> None:
    with pytest.raises(NotFound, match='pods "nobody" not found'):
        await world.client.get(PODS, world.namespace, "nobody")


async def test_resource_that_is_not_served_is_not_found(world: World) -> None:
    things = custom_resource("nothing.everstep.dev", "v1", "things", "Thing", Unstructured)
    with pytest.raises(NotFound):
        await world.client.list(things, world.namespace)


async def test_taken_name_is_told_and_the_object_left_alone(world: World) -> None:
    made = await world.client.create(CONFIGMAPS, world.namespace, configmap("c", {"a": "1"}))
    with pytest.raises(AlreadyExists) as caught:
        await world.client.create(CONFIGMAPS, world.namespace, configmap("c", {"a": "2"}))
    assert (caught.value.status, caught.value.reason) == (409, "AlreadyExists")
    found = await world.client.get(CONFIGMAPS, world.namespace, "c")
    assert found.metadata.resource_version == made.metadata.resource_version


async def test_namespace_that_does_not_exist_is_not_found(world: World) -> None:
    with pytest.raises(NotFound, match='namespaces "nowhere" not found'):
        await world.client.create(PODS, "nowhere", pod("w0"))
    assert (await world.client.list(PODS, "nowhere")).items == ()


@pytest.mark.long
async def test_terminating_namespace_refuses_what_is_new(world: World) -> None:
    holds = {**configmap("holds"), "metadata": {"name": "holds", "finalizers": ["everstep.dev/test"]}}
    await world.client.create(CONFIGMAPS, world.namespace, holds)
    await world.client.delete(NAMESPACES, None, world.namespace)
    with pytest.raises(Forbidden) as caught:
        await world.client.create(PODS, world.namespace, pod("w0"))
    assert "NamespaceTerminating" in {cause.reason for cause in caught.value.causes}
    assert caught.value.status == 403
    await world.client.merge_patch(CONFIGMAPS, world.namespace, "holds", {"metadata": {"finalizers": None}})
    await world.gone(NAMESPACES, world.namespace, None)


async def test_generated_names_begin_with_their_prefix_and_differ(world: World) -> None:
    body = {"metadata": {"generateName": "gen-"}, "data": {}}
    names = [(await world.client.create(CONFIGMAPS, world.namespace, body)).metadata.name for _ in range(3)]
    assert len(set(names)) == 3
    assert all(name.startswith("gen-") and len(name) == 9 for name in names)


async def test_object_without_a_name_is_refused(world: World) -> None:
    with pytest.raises(Invalid) as caught:
        await world.client.create(CONFIGMAPS, world.namespace, {"metadata": {}, "data": {}})
    assert fields(caught) == {"metadata.name"}
    assert [cause.reason for cause in caught.value.causes] == ["FieldValueRequired"]


@pytest.mark.parametrize("name", ["Capital", "under_score", "-dash", "x" * 254])
async def test_name_that_is_no_dns_name_is_refused(world: World, name: str) -> None:
    with pytest.raises(Invalid) as caught:
        await world.client.create(CONFIGMAPS, world.namespace, configmap(name))
    assert fields(caught) == {"metadata.name"}
    assert caught.value.status == 422


async def test_name_of_a_service_begins_with_a_letter(world: World) -> None:
    body = {"metadata": {"name": "1a"}, "spec": {"ports": [{"port": 80}]}}
    with pytest.raises(Invalid) as caught:
        await world.client.create(SERVICES, world.namespace, body)
    assert "metadata.name" in fields(caught)


async def test_bad_label_is_refused_by_field(world: World) -> None:
    with pytest.raises(Invalid) as caught:
        await world.client.create(CONFIGMAPS, world.namespace, configmap("c", None, a="no spaces"))
    assert fields(caught) == {"metadata.labels"}


async def test_body_of_another_namespace_is_refused(world: World) -> None:
    body = configmap("c")
    body["metadata"]["namespace"] = "another"
    with pytest.raises(Invalid) as caught:
        await world.client.create(CONFIGMAPS, world.namespace, body)
    assert caught.value.status == 400


async def test_body_of_another_kind_is_refused(world: World) -> None:
    with pytest.raises(Invalid) as caught:
        await world.client.create(CONFIGMAPS, world.namespace, {**pod("c"), "apiVersion": "v1", "kind": "Pod"})
    assert caught.value.status == 400


async def test_create_with_a_resource_version_is_refused(world: World) -> None:
    body = configmap("c")
    body["metadata"]["resourceVersion"] = "7"
    with pytest.raises(ServerError, match="resourceVersion should not be set on objects to be created"):
        await world.client.create(CONFIGMAPS, world.namespace, body)
    with pytest.raises(NotFound):
        await world.client.get(CONFIGMAPS, world.namespace, "c")


async def test_identity_in_a_body_is_the_servers_to_give(world: World) -> None:
    body = configmap("c")
    body["metadata"] |= {"uid": NO_UID, "creationTimestamp": "2001-01-01T00:00:00Z", "generation": 9}
    made = await world.client.create(CONFIGMAPS, world.namespace, body)
    assert made.metadata.uid != NO_UID
    assert made.metadata.creation_timestamp is not None
    assert made.metadata.creation_timestamp.year > 2001


async def test_list_is_sorted_by_name_and_of_one_namespace(world: World) -> None:
    other = await world.new_namespace()
    for name in ("b", "a-1", "a"):
        await world.client.create(CONFIGMAPS, world.namespace, configmap(name, None, mine="yes"))
    await world.client.create(CONFIGMAPS, other, configmap("c", None, mine="yes"))
    listed = await world.client.list(CONFIGMAPS, world.namespace, label_selector="mine=yes")
    assert [one.metadata.name for one in listed.items] == ["a", "a-1", "b"]
    everywhere = await world.client.list(CONFIGMAPS, label_selector="mine=yes")
    found = {one.key for one in everywhere.items if one.metadata.namespace in (world.namespace, other)}
    assert found == {(world.namespace, "a"), (world.namespace, "a-1"), (world.namespace, "b"), (other, "c")}


async def test_list_of_any_page_size_is_whole(world: World) -> None:
    for number in range(5):
        await world.client.create(CONFIGMAPS, world.namespace, configmap(f"c{number}", None, mine="yes"))
    for limit in (1, 2, 500):
        listed = await world.client.list(CONFIGMAPS, world.namespace, label_selector="mine", limit=limit)
        assert [one.metadata.name for one in listed.items] == [f"c{n}" for n in range(5)]


async def test_list_tells_a_version_not_older_than_its_items(world: World) -> None:
    made = await world.client.create(CONFIGMAPS, world.namespace, configmap("c"))
    listed = await world.client.list(CONFIGMAPS, world.namespace)
    assert int(listed.resource_version) >= int(made.metadata.resource_version)
    cached = await world.client.list(CONFIGMAPS, world.namespace, resource_version="0")
    assert int(cached.resource_version) > 0


SELECTORS = {
    "a=1": ["x"],
    "a==1": ["x"],
    "a!=1": ["y", "z"],
    "a": ["x", "y"],
    "!a": ["z"],
    "a in (1,2)": ["x", "y"],
    "a notin (1)": ["y", "z"],
    "a in (1,2),b=1": ["x"],
    "a=3": [],
}


@pytest.mark.parametrize("selector", SELECTORS)
async def test_selector_chooses_by_labels(world: World, selector: str) -> None:
    await world.client.create(CONFIGMAPS, world.namespace, configmap("x", None, t="s", a="1", b="1"))
    await world.client.create(CONFIGMAPS, world.namespace, configmap("y", None, t="s", a="2"))
    await world.client.create(CONFIGMAPS, world.namespace, configmap("z", None, t="s", b="2"))
    listed = await world.client.list(CONFIGMAPS, world.namespace, label_selector=f"{selector},t=s")
    assert [one.metadata.name for one in listed.items] == SELECTORS[selector]


@pytest.mark.parametrize("selector", ["a in", "=b", "a=b c", "a in 1", "a,,b(", "a>1)"])
async def test_selector_that_is_none_is_refused(world: World, selector: str) -> None:
    with pytest.raises(Invalid) as caught:
        await world.client.list(CONFIGMAPS, world.namespace, label_selector=selector)
    assert caught.value.status == 400


async def test_every_write_gets_a_greater_version(world: World) -> None:
    client, namespace = world.client, world.namespace
    versions = [
        (await client.create(CONFIGMAPS, namespace, configmap("c"))).metadata.resource_version,
        (await client.create(PODS, namespace, pod("w"))).metadata.resource_version,
        (await client.patch_status(PODS, namespace, "w", {"phase": "Running"})).metadata.resource_version,
        (await client.merge_patch(CONFIGMAPS, namespace, "c", {"data": {"a": "1"}})).metadata.resource_version,
    ]
    numbers = [int(version) for version in versions]
    assert numbers == sorted(set(numbers))


async def test_replace_with_an_old_version_conflicts(world: World) -> None:
    made = await world.client.create(CONFIGMAPS, world.namespace, configmap("c", {"a": "1"}))
    body = configmap("c", {"a": "2"})
    body["metadata"]["resourceVersion"] = made.metadata.resource_version
    await world.client.replace(CONFIGMAPS, world.namespace, "c", body)
    with pytest.raises(Conflict) as caught:
        await world.client.replace(CONFIGMAPS, world.namespace, "c", body)
    assert (caught.value.status, caught.value.reason) == (409, "Conflict")
    assert "the object has been modified" in caught.value.message


async def test_replace_without_a_version_is_unconditional_where_the_kind_allows_it(world: World) -> None:
    await world.client.create(CONFIGMAPS, world.namespace, configmap("c", {"a": "1"}, x="1"))
    replaced = await world.client.replace(CONFIGMAPS, world.namespace, "c", configmap("c", {"a": "2"}))
    assert (replaced.metadata.labels, replaced.data) == ({}, {"a": "2"})
    await world.client.create(JOBS, world.namespace, job("j"))
    with pytest.raises(Invalid) as caught:
        await world.client.replace(JOBS, world.namespace, "j", job("j", {"replicas": 3}))
    assert fields(caught) == {"metadata.resourceVersion"}


async def test_replace_of_nothing_is_not_found(world: World) -> None:
    with pytest.raises(NotFound):
        await world.client.replace(CONFIGMAPS, world.namespace, "c", configmap("c"))


async def test_replace_under_another_name_is_refused(world: World) -> None:
    await world.client.create(CONFIGMAPS, world.namespace, configmap("c"))
    with pytest.raises(Invalid) as caught:
        await world.client.replace(CONFIGMAPS, world.namespace, "c", configmap("d"))
    assert caught.value.status == 400


async def test_replace_with_another_uid_conflicts(world: World) -> None:
    await world.client.create(CONFIGMAPS, world.namespace, configmap("c"))
    body = configmap("c")
    body["metadata"]["uid"] = NO_UID
    with pytest.raises(Conflict):
        await world.client.replace(CONFIGMAPS, world.namespace, "c", body)


async def test_write_that_changes_nothing_makes_no_version(world: World) -> None:
    made = await world.client.create(CONFIGMAPS, world.namespace, configmap("c", {"a": "1"}))
    again = await world.client.replace(CONFIGMAPS, world.namespace, "c", configmap("c", {"a": "1"}))
    assert again.metadata.resource_version == made.metadata.resource_version
    patched = await world.client.merge_patch(CONFIGMAPS, world.namespace, "c", {"data": {"a": "1"}})
    assert patched.metadata.resource_version == made.metadata.resource_version


async def test_empty_map_is_an_absent_one_to_a_typed_object(world: World) -> None:
    made = await world.client.create(CONFIGMAPS, world.namespace, {"metadata": {"name": "c", "labels": {"a": "1"}}})
    patched = await world.client.merge_patch(CONFIGMAPS, world.namespace, "c", {"data": {"a": None}})
    replaced = await world.client.replace(CONFIGMAPS, world.namespace, "c", configmap("c", {}, a="1"))
    versions = {one.metadata.resource_version for one in (made, patched, replaced)}
    assert versions == {made.metadata.resource_version}


async def test_merge_patch_changes_what_it_names_and_null_deletes(world: World) -> None:
    body = configmap("c")
    body["metadata"]["annotations"] = {"a": "1", "b": "2"}
    await world.client.create(CONFIGMAPS, world.namespace, body)
    patch = {"metadata": {"annotations": {"a": None, "c": "3", "never": None}}}
    patched = await world.client.merge_patch(CONFIGMAPS, world.namespace, "c", patch)
    assert patched.metadata.annotations == {"b": "2", "c": "3"}


async def test_merge_patch_replaces_lists_as_a_whole(world: World) -> None:
    rules = [{"onExitCodes": [1], "action": "Fail"}, {"onExitCodes": [2], "action": "Fail"}]
    await world.client.create(JOBS, world.namespace, job("j", {"recovery.rules": rules}))
    patch = {"spec": {"recovery": {"rules": rules[1:]}}}
    patched = await world.client.merge_patch(JOBS, world.namespace, "j", patch)
    assert patched.spec["recovery"]["rules"] == rules[1:]


async def test_merge_patch_removes_a_field_of_a_custom_resource(world: World) -> None:
    await world.client.create(JOBS, world.namespace, job("j", {"activeDeadlineSeconds": 60}))
    patch = {"spec": {"activeDeadlineSeconds": None}}
    assert "activeDeadlineSeconds" not in (await world.client.merge_patch(JOBS, world.namespace, "j", patch)).spec
    assert "activeDeadlineSeconds" not in (await world.client.get(JOBS, world.namespace, "j")).spec


async def test_merge_patch_with_an_old_version_conflicts(world: World) -> None:
    made = await world.client.create(CONFIGMAPS, world.namespace, configmap("c"))
    stale = made.metadata.resource_version
    patch = {"data": {"a": "1"}}
    await world.client.merge_patch(CONFIGMAPS, world.namespace, "c", patch, resource_version=stale)
    with pytest.raises(Conflict):
        await world.client.merge_patch(CONFIGMAPS, world.namespace, "c", {"data": {"a": "2"}}, resource_version=stale)


async def test_version_that_is_none_is_refused(world: World) -> None:
    await world.client.create(CONFIGMAPS, world.namespace, configmap("c"))
    with pytest.raises(ServerError, match="invalid syntax"):
        await world.client.merge_patch(CONFIGMAPS, world.namespace, "c", {"data": {"a": "1"}}, resource_version="x")
    with pytest.raises(Invalid):
        await world.client.list(CONFIGMAPS, world.namespace, resource_version="x")


async def test_merge_patch_of_nothing_is_not_found(world: World) -> None:
    with pytest.raises(NotFound):
        await world.client.merge_patch(CONFIGMAPS, world.namespace, "c", {"data": {}})


async def test_text_of_a_secret_is_kept_in_base64(world: World) -> None:
    body = {"metadata": {"name": "s"}, "stringData": {"a": "é", "b": "2"}, "data": {"b": "MQ==", "c": "Mw=="}}
    made = await world.client.create(SECRETS, world.namespace, body)
    assert made.data == {"a": "w6k=", "b": "Mg==", "c": "Mw=="}
    with pytest.raises(Invalid):
        await world.client.merge_patch(SECRETS, world.namespace, "s", {"type": "other"})


async def test_lease_is_created_by_put_and_swapped_by_version(world: World) -> None:
    body = {"metadata": {"name": "l"}, "spec": {"holderIdentity": "a", "leaseDurationSeconds": 6}}
    made = await world.client.create(LEASES, world.namespace, body)
    assert made.spec.holder_identity == "a"
    version = made.metadata.resource_version
    taken = {"metadata": {"name": "l", "resourceVersion": version}, "spec": {"holderIdentity": "b"}}
    assert (await world.client.replace(LEASES, world.namespace, "l", taken)).spec.holder_identity == "b"
    with pytest.raises(Conflict):
        await world.client.replace(LEASES, world.namespace, "l", taken)
    bad = {"metadata": {"name": "m"}, "spec": {"leaseDurationSeconds": 0}}
    with pytest.raises(Invalid) as caught:
        await world.client.create(LEASES, world.namespace, bad)
    assert fields(caught) == {"spec.leaseDurationSeconds"}


async def test_node_has_a_status_of_its_own(world: World) -> None:
    name = f"node-{world.namespace}"
    made = await world.client.create(NODES, None, {"metadata": {"name": name}})
    assert made.metadata.namespace == ""
    try:
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
        await world.client.patch_status(NODES, None, name, {"conditions": [ready]})
        taint = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
        change = {"spec": {"taints": [taint]}, "status": None}
        tainted = await world.client.merge_patch(plain(NODES), None, name, change)
        assert [one["key"] for one in tainted.spec["taints"]][-1:] == ["node.kubernetes.io/unreachable"]
        assert [one["status"] for one in tainted.status["conditions"] if one["type"] == "Ready"] == ["True"]
    finally:
        await world.client.delete(NODES, None, name)


EVENT = {
    "eventTime": "2026-01-01T00:00:00.000000Z",
    "reportingController": "everstep.dev/operator",
    "reportingInstance": "a",
    "action": "Reconcile",
    "reason": "Started",
    "type": "Normal",
    "note": "it began",
}


async def test_event_counts_as_a_series_and_its_words_stay(world: World) -> None:
    regarding = {"kind": "Pod", "namespace": world.namespace, "name": "w0"}
    await world.client.create(EVENTS, world.namespace, {"metadata": {"name": "e"}, **EVENT, "regarding": regarding})
    series = {"series": {"count": 2, "lastObservedTime": "2026-01-01T00:01:00.000000Z"}}
    patched = await world.client.merge_patch(EVENTS, world.namespace, "e", series)
    assert patched.series is not None
    assert patched.series.count == 2
    with pytest.raises(Invalid):
        await world.client.merge_patch(EVENTS, world.namespace, "e", {"note": "another"})


async def test_events_are_listed_by_what_they_are_about_and_their_type(world: World) -> None:
    for name, uid, type_ in (("a", "u0", "Warning"), ("b", "u1", "Warning"), ("c", "u0", "Normal")):
        regarding = {"kind": "Pod", "namespace": world.namespace, "name": "w0", "uid": uid}
        body = {"metadata": {"name": name}, **EVENT, "type": type_, "regarding": regarding}
        await world.client.create(EVENTS, world.namespace, body)
    listed = await world.client.list(EVENTS, world.namespace, field_selector="regarding.uid=u0,type=Warning")
    assert [one.metadata.name for one in listed.items] == ["a"]
    with pytest.raises(KubeError, match="field label not supported"):
        await world.client.list(EVENTS, world.namespace, field_selector="note=u0")


@pytest.mark.parametrize("missing", ["eventTime", "reportingController", "reportingInstance", "action", "reason"])
async def test_event_needs_its_fields(world: World, missing: str) -> None:
    regarding = {"kind": "Pod", "namespace": world.namespace, "name": "w0"}
    body = {"metadata": {"name": "e"}, **EVENT, "regarding": regarding}
    del body[missing]
    with pytest.raises(Invalid) as caught:
        await world.client.create(EVENTS, world.namespace, body)
    assert missing in fields(caught)


async def test_event_about_no_namespace_is_refused_and_about_another_taken(world: World) -> None:
    regarding = {"apiVersion": "v1", "kind": "Pod", "name": "w0"}
    with pytest.raises(Invalid) as caught:
        await world.client.create(EVENTS, world.namespace, {"metadata": {"name": "e"}, **EVENT, "regarding": regarding})
    assert fields(caught) == {"involvedObject.namespace"}
    assert caught.value.message.startswith('Event "e" is invalid')
    body = {"metadata": {"name": "e"}, **EVENT, "regarding": {**regarding, "namespace": "another"}}
    assert (await world.client.create(EVENTS, world.namespace, body)).regarding.namespace == "another"


async def test_service_gets_an_address_that_never_changes(world: World) -> None:
    body = {"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}]}}
    made = await world.client.create(plain(SERVICES), world.namespace, body)
    assert made.spec["clusterIP"].count(".") == 3
    headless = {"metadata": {"name": "h"}, "spec": {"clusterIP": "None", "selector": {"a": "b"}}}
    assert (await world.client.create(plain(SERVICES), world.namespace, headless)).spec["clusterIP"] == "None"
    with pytest.raises(Invalid):
        await world.client.merge_patch(SERVICES, world.namespace, "h", {"spec": {"clusterIP": "10.96.0.9"}})
    with pytest.raises(Invalid) as caught:
        await world.client.create(SERVICES, world.namespace, {"metadata": {"name": "t"}, "spec": {}})
    assert "spec.ports" in fields(caught)
