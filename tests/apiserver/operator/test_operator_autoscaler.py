"""A HorizontalPodAutoscaler of the real controller manager sizes an elastic job over its scale subresource."""

from __future__ import annotations

import pytest

from everstep_operator.kube.resources import custom_resource
from everstep_operator.kube.wire import Unstructured
from everstep_operator.main import JOBS
from support.apiserver.operators import Operators, Place
from support.apiserver.waiting import eventually

pytestmark = pytest.mark.apiserver

AUTOSCALERS = custom_resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler", Unstructured)


@pytest.mark.long  # the controller looks at an autoscaler every 15 s
async def test_autoscaler_grows_and_shrinks_an_elastic_job_within_its_sizes(place: Place) -> None:
    """Without a metrics server the controller still enforces its own bounds, over the same subresource."""
    elastic = {"minReplicas": 2, "maxReplicas": 6, "groupSize": 2}
    await place.create_job(replicas=2, elastic=elastic, rendezvous={"backend": "everstep"})
    async with Operators(place).run():
        await names(place, 2)
        target = {"apiVersion": JOBS.api_version, "kind": JOBS.kind, "name": "digits"}
        cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}
        bounds = {"minReplicas": 5, "maxReplicas": 6}
        spec = {"scaleTargetRef": target, "metrics": [{"type": "Resource", "resource": cpu}], **bounds}
        await place.client.create(AUTOSCALERS, place.namespace, {"metadata": {"name": "digits"}, "spec": spec})

        async def is_found() -> bool:
            return "currentReplicas" in (await place.client.get(AUTOSCALERS, place.namespace, "digits")).status

        await eventually("the controller has learnt of TrainingJobs", is_found)
        await names(place, 4)  # five were asked for, and workers come in groups of two
        assert (await place.job()).spec["replicas"] == 5
        lower = {"spec": {"minReplicas": 1, "maxReplicas": 3}}
        await place.client.merge_patch(AUTOSCALERS, place.namespace, "digits", lower)
        await names(place, 2)
        assert (await place.job()).spec["replicas"] == 3


async def names(place: Place, workers: int) -> None:
    async def holds() -> bool:
        return await place.names() == [f"digits-w{index}-0" for index in range(workers)]

    await eventually(f"the job has {workers} workers", holds)
