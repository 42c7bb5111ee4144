"""The volume claims of a job's workers at a real API server. Nothing binds them: there are no nodes and no classes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from everstep.contract import labels
from everstep_operator.kube.errors import Invalid
from everstep_operator.kube.resources import CLAIMS, Resource
from everstep_operator.kube.wire import Unstructured
from everstep_operator.main import JOBS
from support.apiserver.operators import TEMPLATE, Operators, Place, wait_until_collected
from support.apiserver.quotas import allow_none
from support.apiserver.waiting import eventually

pytestmark = pytest.mark.apiserver

SPEC = {"accessModes": ["ReadWriteOnce"], "storageClassName": "fast", "resources": {"requests": {"storage": "5Gi"}}}
TEMPLATES = [{"metadata": {"name": "cache"}, "spec": SPEC}]


async def claims(place: Place) -> dict[str, Unstructured]:
    return {one.metadata.name: one for one in (await place.client.list(CLAIMS, place.namespace)).items}


def mounting() -> dict[str, Any]:
    """A template whose worker mounts the claim in place of a volume that it has otherwise."""
    template: dict[str, Any] = copy.deepcopy(TEMPLATE)
    template["spec"]["volumes"] = [{"name": "cache", "emptyDir": {}}]
    template["spec"]["containers"][0]["volumeMounts"] = [{"name": "cache", "mountPath": "/cache"}]
    return template


async def test_worker_has_the_claim_of_its_index_and_so_has_its_successor(place: Place) -> None:
    await place.create_job(rendezvous={"backend": "everstep"}, volumeClaimTemplates=TEMPLATES, template=mounting())
    async with Operators(place).run(volume_claims=True):

        async def created() -> bool:
            return await place.names() == ["digits-w0-0", "digits-w1-0"]

        await eventually("the workers are there", created)
        made = await claims(place)
        assert set(made) == {"cache-digits-w0", "cache-digits-w1"}
        assert {k: made["cache-digits-w1"].spec[k] for k in SPEC} == SPEC
        assert made["cache-digits-w1"].metadata.owner_references == (), "kept when the job is deleted"
        await place.start_all()
        await place.end("digits-w1-0", 1)

        async def replaced() -> bool:
            return "digits-w1-1" in await place.names()

        await eventually("worker 1 is replaced", replaced)
        pod = (await place.pods())["digits-w1-1"]
        volumes = [v for v in (await pod_body(place, pod.metadata.name))["spec"]["volumes"] if v["name"] == "cache"]
        assert volumes == [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache-digits-w1"}}]
        uids = {name: one.metadata.uid for name, one in (await claims(place)).items()}
        assert uids == {name: one.metadata.uid for name, one in made.items()}


async def pod_body(place: Place, name: str) -> dict[str, Any]:
    raw = Resource("", "v1", "pods", "Pod", Unstructured)
    return {"spec": (await place.client.get(raw, place.namespace, name)).spec}


@pytest.mark.long
async def test_claims_go_with_the_job_where_it_says_so_and_stay_otherwise(place: Place) -> None:
    await wait_until_collected(place)
    policy = {"whenDeleted": "Delete"}
    await place.create_job("gone", volumeClaimTemplates=TEMPLATES, persistentVolumeClaimRetentionPolicy=policy)
    await place.create_job("kept", volumeClaimTemplates=TEMPLATES)
    async with Operators(place).run(volume_claims=True):

        async def created() -> bool:
            return len(await place.names()) == 4

        await eventually("the workers are there", created)
        for job in ("gone", "kept"):
            await place.client.delete(JOBS, place.namespace, job, propagation="Background")

        async def collected() -> bool:
            # The claims of pods that no kubelet ends are protected: asked to go is all that can be seen here.
            left = await claims(place)
            going = {name for name, one in left.items() if one.metadata.deletion_timestamp is not None}
            return not ({"cache-gone-w0", "cache-gone-w1"} & set(left)) - going

        await eventually("the claims of one job are collected", collected)
        left = await claims(place)
        assert {n for n, one in left.items() if one.metadata.deletion_timestamp is None} == {
            "cache-kept-w0",
            "cache-kept-w1",
        }


async def test_worker_whose_claim_is_refused_is_not_created_and_the_status_says_why(place: Place) -> None:
    """By a quota that is used up, which refuses also the claim that is there already."""
    body = {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1"}}}}
    await place.client.create(CLAIMS, place.namespace, {**body, "metadata": {"name": "cache-digits-w1"}})
    await allow_none(place, "persistentvolumeclaims", CLAIMS, body)
    await place.create_job(volumeClaimTemplates=TEMPLATES)
    async with Operators(place).run(volume_claims=True):

        async def explained() -> bool:
            conditions = {c["type"]: c for c in (await place.status()).get("conditions", ())}
            needs = conditions.get("NeedsAttention", {"status": "False"})
            words = "the API server refuses to create PersistentVolumeClaim cache-digits-w0: "
            return needs["status"] == "True" and words in needs["message"] and "quota" in needs["message"]

        await eventually("the status says why", explained)
        assert await place.names() == ["digits-w1-0"], "its claim is there"


async def test_claim_of_another_job_with_the_same_name_is_not_used(place: Place) -> None:
    """Template a-b of job c, and template a of job b-c."""
    made = {"name": "cache-digits-w0", "labels": {labels.JOB: "b-digits"}}
    await place.client.create(CLAIMS, place.namespace, {"metadata": made, "spec": SPEC})
    await place.create_job(volumeClaimTemplates=TEMPLATES)
    async with Operators(place).run(volume_claims=True):

        async def explained() -> bool:
            conditions = {c["type"]: c for c in (await place.status()).get("conditions", ())}
            needs = conditions.get("NeedsAttention", {"status": "False", "message": ""})
            return needs["status"] == "True" and "cache-digits-w0: it is TrainingJob b-digits's" in needs["message"]

        await eventually("the status says whose it is", explained)
        assert await place.names() == ["digits-w1-0"]


@pytest.mark.long
async def test_worker_waits_until_a_claim_that_is_being_deleted_is_gone(place: Place) -> None:
    held = {"name": "cache-digits-w0", "finalizers": ["example.com/pod-is-there"]}
    await place.client.create(CLAIMS, place.namespace, {"metadata": held, "spec": SPEC})
    await place.client.delete(CLAIMS, place.namespace, "cache-digits-w0")
    await place.create_job(volumeClaimTemplates=TEMPLATES)
    async with Operators(place).run(volume_claims=True):

        async def explained() -> bool:
            conditions = {c["type"]: c for c in (await place.status()).get("conditions", ())}
            needs = conditions.get("NeedsAttention", {"status": "False", "message": ""})
            return needs["status"] == "True" and "cache-digits-w0: the one that is there is being d" in needs["message"]

        await eventually("the status says what is waited for", explained)
        assert await place.names() == ["digits-w1-0"]
        gone = {"metadata": {"finalizers": None}}
        await place.client.merge_patch(CLAIMS, place.namespace, "cache-digits-w0", gone)

        async def created() -> bool:
            return await place.names() == ["digits-w0-0", "digits-w1-0"]

        await eventually("the worker is created with a claim of its own", created)
        assert (await claims(place))["cache-digits-w0"].metadata.deletion_timestamp is None


async def test_templates_of_claims_cannot_be_changed(place: Place) -> None:
    await place.create_job(volumeClaimTemplates=TEMPLATES, suspend=True)
    with pytest.raises(Invalid, match="volumeClaimTemplates is immutable"):
        await place.edit_job(volumeClaimTemplates=[])
