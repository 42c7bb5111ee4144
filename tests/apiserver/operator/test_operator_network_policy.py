"""The NetworkPolicy of a job at a real API server: made, made anew, refused, and gone with the job."""

from __future__ import annotations

from typing import Any

import pytest

from everstep_operator.kube.resources import Resource
from everstep_operator.kube.wire import Unstructured
from support.apiserver.operators import TEMPLATE, Operators, Place
from support.apiserver.quotas import allow_none
from support.apiserver.waiting import eventually

pytestmark = pytest.mark.apiserver

POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", Unstructured)


async def open_ports(place: Place) -> list[list[int]] | None:
    """The ports of each rule for everybody of the job's policy; None if there is none."""
    found = (await place.client.list(POLICIES, place.namespace)).items
    if not found:
        return None
    (policy,) = found
    job = await place.job()
    assert policy.metadata.owner_references[0].uid == job.metadata.uid
    selector = policy.spec["podSelector"]
    assert selector == {"matchLabels": {"everstep.dev/job-uid": job.metadata.uid}}
    assert policy.spec["ingress"][0] == {"from": [{"podSelector": selector}]}
    return [[p["port"] for p in rule["ports"]] for rule in policy.spec["ingress"][1:]]


def template(*ports: int) -> dict[str, Any]:
    (container,) = TEMPLATE["spec"]["containers"]
    return {"spec": {"containers": [{**container, "ports": [{"containerPort": p} for p in ports]}]}}


async def test_job_has_a_policy_for_its_own_pods_and_the_ports_that_it_declares(place: Place) -> None:
    await place.create_job(template=template(6006))
    async with Operators(place).run(network_policies=True):
        await place.running("digits-w0-0", "digits-w1-0")
        assert await open_ports(place) == [[6006]]
        await place.client.delete(POLICIES, place.namespace, "digits-workers")

        async def there_again() -> bool:
            return await open_ports(place) == [[6006]]

        await eventually("a policy that somebody deletes comes back", there_again)
        await place.edit_job(suspend=True)
        await eventually("the job is suspended", lambda: no_pods(place))
        await place.edit_job(suspend=False, template=template())

        async def closed() -> bool:
            await place.start_all()
            return await place.reason() == "Running" and await open_ports(place) == []

        await eventually("the policy follows the template", closed)
        for name in await place.names():
            await place.end(name, 0)

        async def gone() -> bool:
            return await open_ports(place) is None

        await eventually("it is gone with the end of the job", gone)
    assert await place.reason() == "Complete"


async def no_pods(place: Place) -> bool:
    return await place.names() == []


@pytest.mark.long
async def test_policy_that_is_refused_is_told_and_keeps_no_job_from_running(place: Place) -> None:
    counted = "count/networkpolicies.networking.k8s.io"
    await allow_none(place, counted, POLICIES, {"spec": {"podSelector": {}}})
    await place.create_job()
    async with Operators(place).run(network_policies=True):
        await place.running("digits-w0-0", "digits-w1-0")

        async def told() -> bool:
            conditions = {c["type"]: c for c in (await place.status())["conditions"]}
            needs = conditions.get("NeedsAttention", {"status": "False"})
            words = "the API server refuses to create NetworkPolicy digits-workers: "
            return needs["status"] == "True" and words in needs["message"] and "quota" in needs["message"]

        await eventually("the status says that the job has no policy, and why", told)
        assert await place.reason() == "Running"
        stalled = next(c for c in (await place.status())["conditions"] if c["type"] == "Stalled")
        assert stalled["status"] == "False", "by kstatus it would have failed"
