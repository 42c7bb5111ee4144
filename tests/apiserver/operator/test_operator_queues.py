"""The operator and Kueue's controller at a real API server: a job waits for quota, leaves, and comes back."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from everstep_operator.controller import caches
from everstep_operator.kube.resources import EVENTS, PODS, QUEUES, WORKLOADS, Resource
from everstep_operator.kube.wire import Unstructured
from support.apiserver.operators import TEMPLATE, Operators, Place
from support.apiserver.queues import Queue, make_queue
from support.apiserver.waiting import eventually
from support.conformity.bodies import BINDINGS
from testcluster.controlplane import ControlPlane
from testcluster.kueue import Kueue

pytestmark = [pytest.mark.apiserver, pytest.mark.usefixtures("kueue_programs")]

LABEL = {"kueue.x-k8s.io/queue-name": "queue"}
CLUSTER_QUEUES = Resource(QUEUES, "v1beta2", "clusterqueues", "ClusterQueue", Unstructured, namespaced=False)
ELASTIC = {"minReplicas": 1, "maxReplicas": 8}
# Its rounds are none that the operator sees: pods that are Ready train.
ETCD = {"backend": "etcd", "etcd": {"endpoints": ["http://etcd:2379"]}}


def template() -> dict[str, Any]:
    """A worker asks for one CPU, and takes longer to end than any test."""
    made = copy.deepcopy(TEMPLATE)
    made["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1"}}  # type: ignore[index]
    made["spec"]["terminationGracePeriodSeconds"] = 300  # type: ignore[index]
    return made


async def ready(place: Place) -> tuple[str, str]:
    """Reason and message of the job's Ready condition."""
    conditions = (await place.status()).get("conditions", ())
    return next(((c["reason"], c["message"]) for c in conditions if c["type"] == "Ready"), ("", ""))


async def waits(place: Place, why: str) -> None:
    async def does() -> bool:
        reason, message = await ready(place)
        return reason == "Queued" and why in message and not await place.names()

    await eventually(f"the job waits without pods: {why}", does)


async def runs(place: Place, *names: str) -> None:
    """Wait until exactly these pods are there, on nodes, and all Ready."""

    async def do() -> bool:
        for name, pod in (await place.pods()).items():
            if not pod.spec.node_name and pod.metadata.deletion_timestamp is None:
                target = {"kind": "Node", "name": "n1"}
                await place.client.create(BINDINGS, place.namespace, {"metadata": {"name": name}, "target": target})
        await place.start_all()
        return await place.names() == sorted(names) and await place.reason() == "Running"

    await eventually(f"{names} run", do)


async def are_asked_to_end(place: Place, *names: str) -> None:
    async def are() -> bool:
        pods = await place.pods()
        return {n for n, pod in pods.items() if pod.metadata.deletion_timestamp is not None} == set(names)

    await eventually(f"{names} are asked to end", are)


async def have_ended(place: Place, *names: str) -> None:
    for name in names:
        await place.client.delete(PODS, place.namespace, name, grace_seconds=0)


async def workload(place: Place) -> str:
    """The name of the newest Workload of the job."""
    job = await place.job()
    owned = [
        each.metadata.name
        for each in (await place.client.list(WORKLOADS, place.namespace)).items
        if any(owner.uid == job.metadata.uid for owner in each.metadata.owner_references)
    ]
    return max(owned, key=lambda name: int(name.rpartition("-")[2]))


async def condition(place: Place, name: str, kind: str) -> dict[str, Any]:
    conditions = (await place.client.get(WORKLOADS, place.namespace, name)).status.get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {"status": "absent"})


async def holds(place: Place, name: str, kind: str) -> bool:
    return bool((await condition(place, name, kind))["status"] == "True")


async def admitted(place: Place, name: str) -> None:
    await eventually(f"{name} is admitted", lambda: holds(place, name, "Admitted"))


async def used(place: Place) -> int:
    """The CPUs that Kueue itself counts as taken; its status follows within a second or two."""
    queue = await place.client.get(CLUSTER_QUEUES, None, place.namespace)
    return sum(int(flavor["resources"][0]["total"]) for flavor in queue.status.get("flavorsUsage", ()))


async def counts(place: Place, cpus: int) -> None:
    async def are_counted() -> bool:
        return await used(place) == cpus

    await eventually(f"Kueue counts {cpus} CPUs", are_counted)


@asynccontextmanager
async def training(
    crd: ControlPlane, kueue: Kueue, place: Place, cpus: int, replicas: int, **spec: Any
) -> AsyncGenerator[Queue, None]:
    queue = make_queue(crd, kueue, place.namespace, cpus)
    async with Operators(place).run(kueue=True):
        await place.create_job(labels=LABEL, replicas=replicas, rendezvous=ETCD, template=template(), **spec)
        try:
            yield queue
        except AssertionError as e:
            listed = (await place.client.list(WORKLOADS, place.namespace)).items
            shown = "\n".join(f"{each.metadata.name}: {each.spec} {each.status}" for each in listed)
            raise AssertionError(f"{e}\n{await place.status()}\n{shown}\n{kueue.log()[-3000:]}") from e


async def test_job_waits_for_quota_runs_on_the_nodes_of_its_flavor_and_gives_it_back(
    crd: ControlPlane, kueue: Kueue, place: Place
) -> None:
    async with training(crd, kueue, place, cpus=2, replicas=2) as queue:
        await runs(place, "digits-w0-0", "digits-w1-0")
        assert queue.get("pod", "digits-w0-0")["spec"]["nodeSelector"] == {"pool": place.namespace}
        await counts(place, 2)

        await place.create_job("second", labels=LABEL, replicas=1, template=template())

        async def second_waits() -> bool:
            conditions = (await place.status("second")).get("conditions", ())
            (message,) = [c["message"] for c in conditions if c["type"] == "Ready"] or [""]
            return "insufficient unused quota for cpu" in message

        await eventually("the second job says why it waits", second_waits)
        assert await place.names() == ["digits-w0-0", "digits-w1-0"]
        for name in ("digits-w0-0", "digits-w1-0"):
            await place.end(name, 0)

        async def second_runs() -> bool:
            await place.start_all()
            return await place.reason() == "Complete" and await place.reason("second") == "Running"

        await eventually("the quota of the first is the second's", second_runs)
        assert (await condition(place, await workload(place), "Finished"))["reason"] == "Succeeded"
        assert {"JobQueued", "JobAdmitted"} <= set(await place.events())


async def test_evicted_job_saves_first_gives_its_quota_back_and_comes_again(
    crd: ControlPlane, kueue: Kueue, place: Place
) -> None:
    async with training(crd, kueue, place, cpus=2, replicas=2) as queue:
        await runs(place, "digits-w0-0", "digits-w1-0")
        queue.apply(queue.workload("high", 2, priority=100))
        await are_asked_to_end(place, "digits-w0-0", "digits-w1-0")
        assert (await ready(place))[0] == "Queued"
        await have_ended(place, "digits-w0-0")
        await eventually("the operator has seen it", lambda: said(place, "1 are ending"))
        assert await holds(place, await workload(place), "QuotaReserved"), "a pod of it may still save"
        assert not await holds(place, "high", "QuotaReserved")
        await have_ended(place, "digits-w1-0")
        await admitted(place, "high")
        await waits(place, "insufficient unused quota")
        await counts(place, 2)

        queue.set_conditions("high", ("Finished", "True", "Succeeded"))
        await runs(place, "digits-w0-1", "digits-w1-1")
        assert not await holds(place, await workload(place), "Evicted")
        await counts(place, 2)
        status = await place.status()
        assert (status["restarts"]["total"], status.get("recoveries", [])) == (0, []), "an eviction is no loss"


async def said(place: Place, words: str) -> bool:
    return words in (await ready(place))[1]


@pytest.mark.long
async def test_stopped_queue_and_deactivated_workload_bring_the_job_back_when_they_are_begun_again(
    crd: ControlPlane, kueue: Kueue, place: Place
) -> None:
    async with training(crd, kueue, place, cpus=2, replicas=1) as queue:
        await runs(place, "digits-w0-0")
        queue.change("clusterqueue", place.namespace, {"spec": {"stopPolicy": "HoldAndDrain"}})
        await are_asked_to_end(place, "digits-w0-0")
        await have_ended(place, "digits-w0-0")
        await waits(place, "stopped")
        queue.change("clusterqueue", place.namespace, {"spec": {"stopPolicy": "None"}})
        await runs(place, "digits-w0-1")

        name = await workload(place)
        queue.change("workload", name, {"spec": {"active": False}})
        await are_asked_to_end(place, "digits-w0-1")
        await have_ended(place, "digits-w0-1")
        await waits(place, f"Workload {name} is deactivated; set its spec.active to true")
        queue.change("workload", name, {"spec": {"active": True}})
        await runs(place, "digits-w0-2")


async def test_elastic_job_is_admitted_with_a_part_and_shrinks_by_what_is_asked(
    crd: ControlPlane, kueue: Kueue, place: Place
) -> None:
    async with training(crd, kueue, place, cpus=3, replicas=4, elastic=ELASTIC) as queue:
        await runs(place, "digits-w0-0", "digits-w1-0", "digits-w2-0")
        await eventually("it says so", lambda: said(place, "3/3 ready of 4, quota for 3 pods"))
        queue.apply(queue.workload("other", 1))
        await counts(place, 3)
        await place.edit_job(replicas=2)
        await are_asked_to_end(place, "digits-w2-0")
        assert not await holds(place, "other", "QuotaReserved"), "a pod that leaves may still run"
        await have_ended(place, "digits-w2-0")
        await runs(place, "digits-w0-0", "digits-w1-0")
        await admitted(place, "other")
        await counts(place, 3)
        assert not await holds(place, await workload(place), "Evicted")


@pytest.mark.long
async def test_workload_that_somebody_deletes_is_an_eviction(crd: ControlPlane, kueue: Kueue, place: Place) -> None:
    async with training(crd, kueue, place, cpus=2, replicas=1):
        await runs(place, "digits-w0-0")
        await place.client.delete(WORKLOADS, place.namespace, await workload(place))
        await are_asked_to_end(place, "digits-w0-0")
        assert (await place.client.list(WORKLOADS, place.namespace)).items == ()
        await have_ended(place, "digits-w0-0")
        await runs(place, "digits-w0-1")
        await counts(place, 1)


@pytest.mark.long
async def test_user_suspends_a_job_of_a_queue_and_resumes_it(crd: ControlPlane, kueue: Kueue, place: Place) -> None:
    async with training(crd, kueue, place, cpus=2, replicas=1):
        await runs(place, "digits-w0-0")
        await place.edit_job(suspend=True)
        await are_asked_to_end(place, "digits-w0-0")
        assert await holds(place, await workload(place), "QuotaReserved"), "its pod may still save"
        await have_ended(place, "digits-w0-0")
        await counts(place, 0)
        assert (await place.job()).spec["suspend"] is True, "nobody resumes it but its user"
        assert await place.reason() == "Suspended"
        await place.edit_job(suspend=False)
        await runs(place, "digits-w0-1")
        await counts(place, 1)


async def test_cluster_without_kueue_runs_other_jobs_and_says_why_one_of_a_queue_waits(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The API server answers so, with 404, for each version of a kind that is not installed.
    for name in ("WORKLOADS", "FLAVORS", "WORKLOAD_PRIORITY_CLASSES"):
        absent = dataclasses.replace(getattr(caches, name), version="v0")
        monkeypatch.setattr(caches, name, absent)
    async with Operators(place).run(kueue=True):
        await place.create_job(labels=LABEL)
        await place.create_job("other")

        async def other_runs() -> bool:
            await place.start_all()
            return await place.reason("other") == "Running" and await place.names() == ["other-w0-0", "other-w1-0"]

        await eventually("a job without a queue runs", other_runs)
        reason, message = await ready(place)
        assert reason == "Queued"
        assert message.startswith("Workloads of Kueue cannot be read: ")


async def test_elastic_job_grows_into_idle_quota_in_one_resize_and_gives_back_what_is_asked(
    crd: ControlPlane, kueue: Kueue, place: Place
) -> None:
    queue = make_queue(crd, kueue, place.namespace, 6)
    queue.apply(queue.workload("other", 4))
    await admitted(place, "other")
    async with Operators(place).run(kueue=True):
        await place.create_job(labels=LABEL, replicas=6, rendezvous=ETCD, template=template(), elastic=ELASTIC)
        await runs(place, "digits-w0-0", "digits-w1-0")
        await eventually("Kueue says why it does not grow", lambda: said(place, "insufficient unused quota"))
        begun = time.monotonic()
        queue.set_conditions("other", ("Finished", "True", "Succeeded"))
        await runs(place, *(f"digits-w{index}-0" for index in range(6)))
        assert time.monotonic() - begun < 10.0
        await counts(place, 6)
        resized = [
            e.note for e in (await place.client.list(EVENTS, place.namespace)).items if e.reason == "WorldResized"
        ]
        assert resized == ["resizing from 2 to 6 workers"], "each step of its growth would cost a round"
        assert "JobEvicted" not in await place.events()

        await place.edit_job(replicas=3)
        await are_asked_to_end(place, *(f"digits-w{index}-0" for index in (3, 4, 5)))
        await have_ended(place, *(f"digits-w{index}-0" for index in (3, 4, 5)))
        await counts(place, 3)
        assert await holds(place, await workload(place), "Admitted")
        (left,) = [w for w in (await place.client.list(WORKLOADS, place.namespace)).items if w.metadata.name != "other"]
        assert left.metadata.name == await workload(place), "those that were replaced are deleted"
