"""The PodGroup of a job at a real API server, and the marks of its pods.

The kinds of Coscheduling and Volcano are made by the test, with the fields that the operator writes; neither scheduler
runs here. Kubernetes' own scheduler does, in `test_gang_scheduler`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from everstep_operator.api.types import GangScheduler
from everstep_operator.kube.resources import POD_GROUPS
from everstep_operator.kube.wire import Unstructured
from support.apiserver.operators import Operators, Place
from support.apiserver.waiting import eventually

pytestmark = pytest.mark.apiserver
SERVED = 30.0  # seconds until a new kind is served

INTEGER, TEXT = {"type": "integer", "format": "int32"}, {"type": "string"}
FIELDS = {
    GangScheduler.COSCHEDULING: {"minMember": INTEGER, "scheduleTimeoutSeconds": INTEGER},
    GangScheduler.VOLCANO: {"minMember": INTEGER, "queue": TEXT, "priorityClassName": TEXT},
}


def definition(scheduler: GangScheduler) -> dict[str, Any]:
    kind = POD_GROUPS[scheduler]
    spec = {"type": "object", "properties": FIELDS[scheduler]}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{kind.group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},  # k8s.io and x-k8s.io are guarded
        },
        "spec": {
            "group": kind.group,
            "scope": "Namespaced",
            "names": {"plural": kind.plural, "singular": "podgroup", "kind": kind.kind, "listKind": "PodGroupList"},
            "versions": [{"name": kind.version, "served": True, "storage": True, "schema": schema}],
        },
    }


@pytest.fixture(scope="module")
def pod_group_kinds(crd: Any) -> None:
    for scheduler in FIELDS:
        done = crd.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(definition(scheduler)))
        assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + SERVED
    names = [f"podgroups.{POD_GROUPS[scheduler].group}" for scheduler in FIELDS]
    while any(crd.kubectl("get", name).returncode for name in names):
        assert time.monotonic() < deadline, f"{names} are not served within {SERVED:.0f} s"
        time.sleep(0.1)


async def group(place: Place, scheduler: GangScheduler) -> Unstructured | None:
    """The only one of this namespace; None if there is none."""
    found = (await place.client.list(POD_GROUPS[scheduler], place.namespace)).items
    assert len(found) < 2
    return found[0] if found else None


def has(place: Place, scheduler: GangScheduler, spec: dict[str, Any] | None) -> Callable[[], Any]:
    async def holds() -> bool:
        found = await group(place, scheduler)
        return (None if found is None else found.spec) == spec

    return holds


@pytest.mark.usefixtures("pod_group_kinds")
@pytest.mark.long_but("volcano")
@pytest.mark.parametrize(
    ("asked", "spec"),
    [
        ({"scheduler": "Coscheduling", "scheduleTimeoutSeconds": 30}, {"scheduleTimeoutSeconds": 30}),
        ({"scheduler": "Volcano", "queue": "research"}, {"queue": "research"}),
    ],
    ids=["coscheduling", "volcano"],
)
async def test_job_has_a_group_of_its_smallest_size_for_as_long_as_it_wants_workers(
    place: Place, asked: dict[str, Any], spec: dict[str, Any]
) -> None:
    scheduler = GangScheduler(asked["scheduler"])
    elastic = {"minReplicas": 1, "maxReplicas": 2}
    await place.create_job(rendezvous={"backend": "everstep"}, elastic=elastic, scheduling={"podGroup": asked})
    async with Operators(place).run(pod_groups=(scheduler,)):

        async def created() -> bool:
            return len(await place.names()) == 2

        await eventually("its workers are there", created)
        made = await group(place, scheduler)
        assert made is not None
        assert (made.metadata.name, made.spec) == ("digits-workers", {"minMember": 1, **spec})
        assert made.metadata.owner_references[0].uid == (await place.job()).metadata.uid
        for pod in (await place.pods()).values():
            if scheduler is GangScheduler.VOLCANO:
                assert pod.metadata.annotations["scheduling.k8s.io/group-name"] == "digits-workers"
            else:
                assert pod.metadata.labels["scheduling.x-k8s.io/pod-group"] == "digits-workers"

        await place.edit_job(elastic={"minReplicas": 2})
        await eventually("it asks for the new size", has(place, scheduler, {"minMember": 2, **spec}))
        await place.client.delete(POD_GROUPS[scheduler], place.namespace, "digits-workers")
        await eventually("one that somebody deletes comes back", has(place, scheduler, {"minMember": 2, **spec}))
        await place.edit_job(suspend=True)
        await eventually("it is gone while the job is suspended", has(place, scheduler, None))
        await place.edit_job(suspend=False)
        await eventually("it is there again", has(place, scheduler, {"minMember": 2, **spec}))

        await eventually("its workers too", created)
        for name in await place.names():
            await place.end(name, 0)
        await eventually("it is gone with the end of the job", has(place, scheduler, None))
    assert await place.reason() == "Complete"


async def test_job_starts_no_worker_where_the_cluster_does_not_serve_the_kind(place: Place) -> None:
    await place.create_job(scheduling={"podGroup": {"scheduler": "Kubernetes"}})
    async with Operators(place).run(pod_groups=(GangScheduler.KUBERNETES,)):

        async def explained() -> bool:
            conditions = {c["type"]: c for c in (await place.status()).get("conditions", ())}
            needs = conditions.get("NeedsAttention", {"status": "False"})
            words = "this cluster does not serve scheduling.k8s.io/v1beta1, which comes with Kubernetes"
            return needs["status"] == "True" and words in needs["message"]

        await eventually("the status says why", explained)
        assert await place.names() == []
