"""Worker 0 decides that a job is complete, at a real API server: the others end with their grace period."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.apiserver.operators import TEMPLATE, NewPlace, Operators, Place
from support.apiserver.waiting import eventually
from support.conformity.bodies import BINDINGS

pytestmark = pytest.mark.apiserver
GRACE = 300  # seconds; longer than any test
WORKERS = ("digits-w0-0", "digits-w1-0", "digits-w2-0")
WRITES = 5  # more than the end of such a job takes: its status, a delete, an event


async def train(place: Place, backend: str) -> None:
    """Three workers run, two of them on a node: a pod without one is deleted without grace."""
    template: dict[str, Any] = copy.deepcopy(TEMPLATE)
    template["spec"]["terminationGracePeriodSeconds"] = GRACE
    await place.create_job(
        replicas=3, rendezvous={"backend": backend}, successPolicy="Worker0", podCleanup="None", template=template
    )
    async with Operators(place).run():

        async def created() -> bool:
            return await place.names() == list(WORKERS)

        await eventually("the workers are there", created)
        for pod in WORKERS:
            target = {"kind": "Node", "name": "n1"}
            await place.client.create(BINDINGS, place.namespace, {"metadata": {"name": pod}, "target": target})
            await place.start(pod)


async def others_end(place: Place) -> None:
    """The job is complete, its worker 0 is kept, and the pods of the others are asked to end in time."""
    begun = datetime.now(UTC)

    async def holds() -> bool:
        pods = await place.pods()
        ending = {name for name, pod in pods.items() if pod.metadata.deletion_timestamp is not None}
        return await place.reason() == "Complete" and ending == set(WORKERS[1:]) and set(pods) == set(WORKERS)

    await eventually("the job is complete, and the others are asked to end", holds)
    for name in WORKERS[1:]:
        ends = (await place.pods())[name].metadata.deletion_timestamp
        assert ends is not None
        assert ends > begun + timedelta(seconds=GRACE / 2)


@pytest.mark.parametrize("backend", ["everstep", "c10d"])
async def test_success_of_worker_0_completes_the_job_and_ends_the_others_with_their_grace(
    place: Place, backend: str
) -> None:
    await train(place, backend)
    async with Operators(place).run():
        await place.end(WORKERS[0], 0)
        await others_end(place)
    status = await place.status()
    complete = next(c for c in status["conditions"] if c["type"] == "Complete")
    assert complete["message"] == "worker 0 succeeded (spec.successPolicy: Worker0)"
    assert status["restarts"]["total"] == 0


async def test_success_of_another_worker_completes_nothing(place: Place) -> None:
    await train(place, "everstep")
    async with Operators(place).run():
        await place.end(WORKERS[1], 0)

        async def seen() -> bool:
            ready = next(c for c in (await place.status())["conditions"] if c["type"] == "Ready")
            return "1 succeeded" in str(ready["message"])

        await eventually("the success is in the status", seen)
        assert await place.reason() != "Complete"
        await place.end(WORKERS[0], 0)

        async def complete() -> bool:
            return await place.reason() == "Complete"

        await eventually("the job is complete", complete)


@pytest.mark.long
async def test_operator_that_dies_after_any_write_of_the_end_is_followed_by_one_that_ends_the_job(
    new_place: NewPlace,
) -> None:
    for writes in range(WRITES):
        place = await new_place()
        await train(place, "everstep")
        await place.end(WORKERS[0], 0)
        await place.end(WORKERS[2], 1)  # a failure in the same moment
        async with Operators(place).run(dies_after=writes) as client:

            async def dead_or_over(client: Any = client, place: Place = place) -> bool:
                return client.dead.is_set() or "JobCompleted" in await place.events()

            await eventually("the operator is dead, or the job has ended", dead_or_over)
        async with Operators(place).run():

            async def over(place: Place = place) -> bool:
                pods = await place.pods()
                ended = pods[WORKERS[1]].metadata.deletion_timestamp is not None
                return ended and await place.reason() == "Complete"

            await eventually("the job is complete, and the other worker is asked to end", over)
        assert (await place.status())["restarts"]["total"] == 0, f"after {writes} writes"
        assert await place.names() == list(WORKERS), f"after {writes} writes"
