"""What is refused, with which fields, and what is added to what is accepted."""

from __future__ import annotations

from typing import Any

import pytest

from everstep_operator.api import parse_spec
from everstep_operator.kube.errors import Invalid
from everstep_operator.kube.resources import PODS
from support.conformity.bodies import ABSENT, CONTAINER, JOBS, job, pod
from support.conformity.world import World

RULE = {"onExitCodes": [2], "action": "Fail"}
ELASTIC = {"minReplicas": 2, "maxReplicas": 8}

# name of the case -> (changes, reason and field of a cause that must be there)
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "below_minimum": ({"replicas": 0}, ("FieldValueInvalid", "spec.replicas")),
    "above_maximum": ({"replicas": 4097}, ("FieldValueInvalid", "spec.replicas")),
    "text_for_a_number": ({"replicas": "3"}, ("FieldValueTypeInvalid", "spec.replicas")),
    "boolean_for_a_number": ({"replicas": True}, ("FieldValueTypeInvalid", "spec.replicas")),
    "fraction_for_an_integer": ({"replicas": 1.5}, ("FieldValueTypeInvalid", "spec.replicas")),
    "object_for_a_list": ({"recovery.rules": {}}, ("FieldValueTypeInvalid", "spec.recovery.rules")),
    "required_field_absent": ({"replicas": ABSENT}, ("FieldValueRequired", "spec.replicas")),
    "required_field_of_an_element": (
        {"recovery.rules": [{"onExitCodes": [2]}]},
        ("FieldValueRequired", "spec.recovery.rules[0].action"),
    ),
    "word_not_in_the_enum": ({"podCleanup": "Some"}, ("FieldValueNotSupported", "spec.podCleanup")),
    "word_of_an_element": (
        {"recovery.rules": [{"onReasons": ["Bored"], "action": "Fail"}]},
        ("FieldValueNotSupported", "spec.recovery.rules[0].onReasons[0]"),
    ),
    "pattern": ({"managedBy": "kueue"}, ("FieldValueInvalid", "spec.managedBy")),
    "too_long": ({"checkpoint.url": "s3://b/" + "a" * 1024}, ("FieldValueTooLong", "spec.checkpoint.url")),
    "too_many_items": ({"recovery.rules": [RULE] * 33}, ("FieldValueTooMany", "spec.recovery.rules")),
    "too_few_items": (
        {"recovery.rules": [{"onExitCodes": [], "action": "Fail"}]},
        ("FieldValueInvalid", "spec.recovery.rules[0].onExitCodes"),
    ),
    "value_of_an_open_map": (
        {"template.metadata": {"annotations": {"a": "x" * 40_000}}},
        ("FieldValueTooLong", "spec.template.metadata.annotations.a"),
    ),
    "rule_at_a_field": ({"processesPerReplica": "cpu"}, ("FieldValueInvalid", "spec.processesPerReplica")),
    "rule_over_an_object": (
        {"recovery.backoffSeconds": {"initial": 60, "max": 30}},
        ("FieldValueInvalid", "spec.recovery.backoffSeconds.initial"),
    ),
    "rule_of_an_element": ({"recovery.rules": [{"action": "Fail"}]}, ("FieldValueInvalid", "spec.recovery.rules[0]")),
    "rule_with_a_macro": (
        {"template.spec.containers": [CONTAINER, CONTAINER]},
        ("FieldValueInvalid", "spec.template"),
    ),
    "rule_with_split": ({"checkpoint.url": "s3://b/a/../c"}, ("FieldValueInvalid", "spec.checkpoint.url")),
    "rule_with_has": (
        {"checkpoint": {"url": "s3://b/c", "everySeconds": 5, "everySteps": 5}},
        ("FieldValueInvalid", "spec.checkpoint.everySteps"),
    ),
    "rule_with_arithmetic": (
        {"replicas": 4, "elastic": {**ELASTIC, "minReplicas": 3, "groupSize": 2}},
        ("FieldValueInvalid", "spec.elastic.minReplicas"),
    ),
    "host_name": ({"template.spec.hostname": "a"}, ("FieldValueInvalid", "spec.template.spec.hostname")),
    "subdomain": ({"template.spec.subdomain": "a"}, ("FieldValueInvalid", "spec.template.spec.subdomain")),
    "fqdn": (
        {"template.spec.setHostnameAsFQDN": True},
        ("FieldValueInvalid", "spec.template.spec.setHostnameAsFQDN"),
    ),
    "restart_policy": (
        {"template.spec.restartPolicy": "OnFailure"},
        ("FieldValueInvalid", "spec.template.spec.restartPolicy"),
    ),
    "container_that_restarts_itself": (
        {"template.spec.containers": [{"name": "worker", "image": "a", "restartPolicy": "Always"}]},
        ("FieldValueInvalid", "spec.template.spec.containers"),
    ),
    "label_of_ours": (
        {"template.metadata": {"labels": {"a": "b", "everstep.dev/round": "9"}}},
        ("FieldValueInvalid", "spec.template.metadata.labels"),
    ),
    "rule_over_a_field_that_cel_reserves": (
        {"template.metadata": {"namespace": "elsewhere"}},
        ("FieldValueInvalid", "spec.template.metadata.namespace"),
    ),
    "volume_of_ours": (
        {"template.spec.volumes": [{"name": "a"}, {"name": "everstep-etcd"}]},
        ("FieldValueInvalid", "spec.template.spec.volumes"),
    ),
    "beyond_64_bits": ({"replicas": 2**63}, ("FieldValueTypeInvalid", "spec.replicas")),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_bad_job_is_refused_with_reason_and_field(world: World, case: str) -> None:
    changes, expected = REFUSED[case]
    with pytest.raises(Invalid) as caught:
        await world.client.create(JOBS, world.namespace, job("j", changes))
    assert (caught.value.status, caught.value.reason) == (422, "Invalid")
    assert expected in {(cause.reason, cause.field) for cause in caught.value.causes}
    assert (await world.client.list(JOBS, world.namespace)).items == ()


async def test_every_wrong_field_is_named_at_once(world: World) -> None:
    changes = {"replicas": 0, "managedBy": "kueue", "recovery.maxRestarts": -1}
    with pytest.raises(Invalid) as caught:
        await world.client.create(JOBS, world.namespace, job("j", changes))
    found = {cause.field for cause in caught.value.causes}
    assert found == {"spec.replicas", "spec.managedBy", "spec.recovery.maxRestarts"}


async def test_rules_are_not_asked_about_what_has_wrong_types(world: World) -> None:
    changes = {"recovery.backoffSeconds": {"initial": "60", "max": 30}, "suspend": True}
    with pytest.raises(Invalid) as caught:
        await world.client.create(JOBS, world.namespace, job("j", changes))
    found = [(cause.field, cause.message) for cause in caught.value.causes]
    assert [field for field, _ in found] == ["spec.recovery.backoffSeconds.initial", "<nil>"]
    assert "some validation rules were not checked because the object was invalid" in found[1][1]


async def test_rule_over_the_name_is_asked(world: World) -> None:
    with pytest.raises(Invalid) as caught:
        await world.client.create(JOBS, world.namespace, job("a.b"))
    assert "a Service is named after it" in caught.value.message
    assert (await world.client.create(JOBS, world.namespace, job("a" * 48))).metadata.name == "a" * 48


ACCEPTED: dict[str, dict[str, Any]] = {
    "least": {},
    "auto_processes": {"processesPerReplica": "auto"},
    "half_a_recovery": {"recovery": {"hang": {"floorSeconds": 30}}},
    "checkpoint": {"checkpoint": {"url": "s3://b/c", "everySteps": 100}},
    "nulls_are_absent": {"activeDeadlineSeconds": None, "managedBy": None, "recovery.hang": {"timeoutSeconds": None}},
    "null_takes_the_default": {"podCleanup": None, "recovery": None},
    "free_form_template": {
        "template": {
            "metadata": {"labels": {"team": "a"}},
            "spec": {"containers": [{**CONTAINER, "resources": {"limits": {"nvidia.com/gpu": 1}}}], "nodeSelector": {}},
        }
    },
}


@pytest.mark.parametrize("case", ACCEPTED)
async def test_good_job_is_stored_with_its_defaults(world: World, case: str) -> None:
    stored = (await world.client.create(JOBS, world.namespace, job("j", ACCEPTED[case]))).spec
    assert stored == parse_spec(stored).to_wire()
    assert stored["recovery"]["backoffSeconds"] == {"initial": 1, "max": 300}


async def test_default_returns_where_a_field_is_removed(world: World) -> None:
    await world.client.create(JOBS, world.namespace, job("j", {"recovery.maxRestarts": 1}))
    patched = await world.client.merge_patch(JOBS, world.namespace, "j", {"spec": {"recovery": {"maxRestarts": None}}})
    assert patched.spec["recovery"]["maxRestarts"] > 1


async def test_unknown_field_is_pruned_and_unknown_field_of_the_template_kept(world: World) -> None:
    changes = {"epochs": 3, "recovery.maxRestart": 3, "template.spec.unheardOf": {"a": [1, None]}}
    stored = (await world.client.create(JOBS, world.namespace, job("j", changes))).spec
    assert "epochs" not in stored
    assert "maxRestart" not in stored["recovery"]
    assert stored["template"]["spec"]["unheardOf"] == {"a": [1, None]}


IMMUTABLE: dict[str, tuple[dict[str, Any], str]] = {
    "field_changed": ({"checkpoint": {"url": "s3://bucket/other"}}, "spec.checkpoint.url"),
    "field_removed": ({"checkpoint": None}, "spec.checkpoint.url"),
    "number_to_word": ({"processesPerReplica": "auto"}, "spec.processesPerReplica"),
    "object_changed": ({"rendezvous": {"joinTimeoutSeconds": 60}}, "spec.rendezvous"),
    "field_added": ({"managedBy": "example.com/other"}, "spec.managedBy"),
}


@pytest.mark.parametrize("case", IMMUTABLE)
async def test_rule_over_the_old_value_refuses_a_change(world: World, case: str) -> None:
    change, field = IMMUTABLE[case]
    made = await world.client.create(JOBS, world.namespace, job("j", {"checkpoint": {"url": "s3://bucket/a"}}))
    with pytest.raises(Invalid) as caught:
        await world.client.merge_patch(JOBS, world.namespace, "j", {"spec": change})
    assert field in {cause.field for cause in caught.value.causes}
    assert "immutable" in caught.value.message
    found = await world.client.get(JOBS, world.namespace, "j")
    assert found.metadata.resource_version == made.metadata.resource_version


@pytest.mark.parametrize("case", [case for case in IMMUTABLE if case != "field_added"])
async def test_rule_over_the_old_value_lets_an_update_pass_that_suspends_or_resumes(world: World, case: str) -> None:
    change, _ = IMMUTABLE[case]
    made = await world.client.create(JOBS, world.namespace, job("j", {"checkpoint": {"url": "s3://bucket/a"}}))
    suspended = await world.client.merge_patch(JOBS, world.namespace, "j", {"spec": {**change, "suspend": True}})
    assert suspended.spec != {**made.spec, "suspend": True}
    back = {field: made.spec[field] for field in change}
    resumed = await world.client.merge_patch(JOBS, world.namespace, "j", {"spec": {**back, "suspend": False}})
    assert resumed.spec == made.spec


async def test_counter_of_reruns_is_raised_only_for_a_job_that_has_finished_and_with_it_anything(world: World) -> None:
    """The rule over the whole object sees the status that is stored, and none that the edit brings."""
    await world.client.create(JOBS, world.namespace, job("j", {"checkpoint": {"url": "s3://bucket/a"}, "rerun": 3}))
    over = {"completionTime": "2026-01-01T00:00:00Z"}
    for change in ({"spec": {"rerun": 4}}, {"spec": {"rerun": 4}, "status": over}):
        with pytest.raises(Invalid) as caught:
            await world.client.merge_patch(JOBS, world.namespace, "j", change)
        assert "spec.rerun" in {cause.field for cause in caught.value.causes}
        assert "set spec.suspend: true" in caught.value.message
    lowered = await world.client.merge_patch(JOBS, world.namespace, "j", {"spec": {"rerun": 2}})
    assert lowered.spec["rerun"] == 2
    await world.client.patch_status(JOBS, world.namespace, "j", over)
    with pytest.raises(Invalid) as caught:
        await world.client.merge_patch(JOBS, world.namespace, "j", {"spec": {"checkpoint": None}})
    assert "raise spec.rerun in the same update" in caught.value.message
    changes = {"checkpoint": {"url": "s3://bucket/b"}, "rendezvous": {"joinTimeoutSeconds": 60}, "rerun": 4}
    again = await world.client.merge_patch(JOBS, world.namespace, "j", {"spec": changes})
    assert (again.spec["rerun"], again.spec["checkpoint"]["url"]) == (4, "s3://bucket/b")
    with pytest.raises(Invalid) as caught:
        await world.client.merge_patch(
            JOBS, world.namespace, "j", {"spec": {"managedBy": "example.com/other", "rerun": 5}}
        )
    assert "spec.managedBy" in {cause.field for cause in caught.value.causes}


async def test_rule_over_the_old_value_lets_other_changes_pass(world: World) -> None:
    await world.client.create(JOBS, world.namespace, job("j", {"checkpoint": {"url": "s3://bucket/a"}}))
    change = {"replicas": 5, "checkpoint": {"everySeconds": 60, "keep": 9}, "ttlSecondsAfterFinished": 100}
    spec = (await world.client.merge_patch(JOBS, world.namespace, "j", {"spec": change})).spec
    assert (spec["replicas"], spec["checkpoint"]["keep"], spec["checkpoint"]["url"]) == (5, 9, "s3://bucket/a")


BAD_PODS: dict[str, tuple[dict[str, Any], str]] = {
    "no_containers": ({"containers": []}, "spec.containers"),
    "no_container_name": ({"containers": [{"image": "a"}]}, "spec.containers[0].name"),
    "no_image": ({"containers": [{"name": "a"}]}, "spec.containers[0].image"),
    "container_name_with_dots": ({"containers": [{"name": "a.b", "image": "a"}]}, "spec.containers[0].name"),
    "same_name_twice": ({"containers": [{"name": "a", "image": "a"}] * 2}, "spec.containers[1].name"),
    "restart_policy": ({"restartPolicy": "Perhaps"}, "spec.restartPolicy"),
    "hostname": ({"hostname": "a.b"}, "spec.hostname"),
    "negative_deadline": ({"activeDeadlineSeconds": 0}, "spec.activeDeadlineSeconds"),
    "mount_of_no_volume": (
        {"containers": [{"name": "a", "image": "a", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]},
        "spec.containers[0].volumeMounts[0].name",
    ),
}


@pytest.mark.parametrize("case", BAD_PODS)
async def test_bad_pod_is_refused_by_field(world: World, case: str) -> None:
    changes, field = BAD_PODS[case]
    body = pod("w")
    body["spec"] |= changes
    with pytest.raises(Invalid) as caught:
        await world.client.create(PODS, world.namespace, body)
    assert field in {cause.field for cause in caught.value.causes}


@pytest.mark.parametrize(
    "change",
    [
        {"nodeName": "n"},
        {"hostname": "other"},
        {"restartPolicy": "Never"},
        {"containers": [{"name": "worker", "image": "none:1", "command": ["other"]}]},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_spec_of_a_pod_cannot_be_changed(world: World, change: dict[str, Any]) -> None:
    await world.client.create(PODS, world.namespace, pod("w"))
    with pytest.raises(Invalid) as caught:
        await world.client.merge_patch(PODS, world.namespace, "w", {"spec": change})
    assert "spec" in {cause.field for cause in caught.value.causes}


async def test_image_of_a_pod_can_be_changed(world: World) -> None:
    body = pod("w")
    # Without the token's mount, which a patch of the list would take away.
    body["spec"]["automountServiceAccountToken"] = False
    made = await world.client.create(PODS, world.namespace, body)
    containers = [{"name": "worker", "image": "other:2", "imagePullPolicy": "IfNotPresent"}]
    patched = await world.client.merge_patch(PODS, world.namespace, "w", {"spec": {"containers": containers}})
    assert int(patched.metadata.resource_version) > int(made.metadata.resource_version)
    assert patched.metadata.generation == 2
