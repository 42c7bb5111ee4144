"""What an operator does for jobs at a real API server: names, owners, edits, refusals, and jobs that spoil."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from everstep_operator.kube.resources import EVENTS, PODS, SERVICES, Resource
from everstep_operator.kube.wire import Unstructured, controller_uid
from everstep_operator.main import JOBS
from support.apiserver.operators import NewPlace, Operators, Place, wait_until_collected
from support.apiserver.waiting import eventually
from support.conformity.bodies import NAMESPACES

pytestmark = pytest.mark.apiserver

QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota", Unstructured)
FULL_PODS = Resource("", "v1", "pods", "Pod", Unstructured)
SERVICE_SPECS = Resource("", "v1", "services", "Service", Unstructured)
SECRET = "hunter2-wandb-key"


def environment(pod: Unstructured) -> dict[str, str]:
    [container] = [c for c in pod.spec["containers"] if c["name"] == "worker"]
    return {e["name"]: e.get("value", "") for e in container["env"]}


async def test_new_job_gets_a_service_and_pods_that_know_who_they_are(place: Place) -> None:
    job = await place.create_job()
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")

        async def told() -> bool:
            return bool(await place.events() == ["WorldFormed"])

        await eventually("an event tells that the world formed", told)
    first, second = [await place.client.get(FULL_PODS, place.namespace, f"digits-w{i}-0") for i in (0, 1)]
    assert environment(first)["PET_RDZV_ENDPOINT"] == "localhost:29400"
    env = environment(second)
    assert env["PET_RDZV_ENDPOINT"] == f"digits-w0-0.digits-workers.{place.namespace}.svc:29400"
    assert (env["PET_NNODES"], env["PET_RDZV_ID"]) == ("2", f"{job.metadata.uid}-1")
    assert (env["EVERSTEP_ROUND"], env["EVERSTEP_WORKER_INDEX"]) == ("1", "1")
    assert [o.uid for o in second.metadata.owner_references] == [job.metadata.uid]
    service = await place.client.get(SERVICE_SPECS, place.namespace, "digits-workers")
    assert service.spec["clusterIP"] == "None"
    status = await place.status()
    assert (status["replicas"], status["readyReplicas"]) == (2, 2)
    assert status["selector"] == "everstep.dev/job=digits"


async def test_failed_pod_is_replaced_with_its_world_and_charged_once(place: Place) -> None:
    await place.create_job(recovery={"backoffSeconds": {"initial": 0, "max": 0}})
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
        await place.end("digits-w1-0", 137)
        await place.running("digits-w0-1", "digits-w1-1")
        await place.client.delete(PODS, place.namespace, "digits-w0-1")
        await place.running("digits-w0-2", "digits-w1-2")
        status = await place.status()
    restarts = status["restarts"]
    assert (restarts["infrastructure"], restarts["userCode"], restarts["total"]) == (2, 0, 2)
    assert [(r["cause"], r["worker"], r["rung"]) for r in status["recoveries"]] == [
        ("PodDeleted", 0, "recreate"),
        ("Signaled", 1, "recreate"),
    ]
    assert (await place.events()).count("WorkerLost") == 2


async def test_columns_read_as_they_are_documented(place: Place, crd: Any) -> None:
    await place.create_job()
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
        await place.end("digits-w1-0", 137)
        await place.running("digits-w0-1", "digits-w1-1")
        plain = crd.kubectl("get", "tjob", "digits", "--namespace", place.namespace)
        wide = crd.kubectl("get", "tjob", "digits", "--namespace", place.namespace, "-o", "wide")
    header, row = (line.split() for line in plain.stdout.strip().splitlines())
    assert header == ["NAME", "STATUS", "READY", "DESIRED", "MIN", "MAX", "STEP", "CKPT", "RESTARTS", "GOODPUT", "AGE"]
    assert row[:4] == ["digits", "Running", "2", "2"]
    assert "1" in row[4:]  # one restart; figures that nobody reported are blank
    assert wide.stdout.splitlines()[0].split()[11:] == ["ROUND", "SPARES", "LAST-FAILURE", "ETA", "IMAGE"]
    assert wide.stdout.splitlines()[1].split()[-1] == "train:1"


@pytest.mark.long
async def test_replicas_edited_fifty_times_in_a_second_end_at_the_last_value(place: Place) -> None:
    """Case 7."""
    await place.create_job()
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
        for number in range(50):
            await place.edit_job(replicas=1 + (number * 7) % 5)
        await place.edit_job(replicas=3)
        await settled(place, 3)
        status = await place.status()
    assert status["restarts"]["total"] == 0
    assert status["world"]["size"] == 3


async def settled(place: Place, size: int) -> None:
    """Wait until the job runs with exactly the pods of its published round, `size` of them."""
    deadline = asyncio.get_running_loop().time() + 40
    while True:
        await place.start_all()
        status = await place.status()
        world = status.get("world", {})
        wanted = sorted(f"digits-w{i}-{world.get('round', 1) - 1}" for i in range(size))
        if world.get("size") == size and await place.names() == wanted and await place.reason() == "Running":
            return
        assert asyncio.get_running_loop().time() < deadline, (status, await place.names())
        await asyncio.sleep(0.03)


async def test_jobs_of_one_name_in_two_namespaces_do_not_meet(new_place: NewPlace) -> None:
    here, there = await new_place(), await new_place()
    jobs = [await here.create_job(), await there.create_job(replicas=1)]
    async with Operators(here).run(), Operators(there).run():
        await here.running("digits-w0-0", "digits-w1-0")
        await there.running("digits-w0-0")
        await here.end("digits-w0-0", 137)
        await here.running("digits-w0-1", "digits-w1-1")
        assert await there.names() == ["digits-w0-0"]
        assert (await there.status())["restarts"]["total"] == 0
    ids = []
    for place, job in zip((here, there), jobs, strict=True):
        [service] = (await place.client.list(SERVICE_SPECS, place.namespace)).items
        assert service.spec["selector"] == {"everstep.dev/job-uid": job.metadata.uid}
        pod = (await place.client.list(FULL_PODS, place.namespace)).items[0]
        ids.append(environment(pod)["PET_RDZV_ID"])
    assert len(set(ids)) == 2


@pytest.mark.long
async def test_quota_that_refuses_a_worker_is_shown_steadily_and_waited_out(place: Place) -> None:
    """Case 16. While it lasts nothing is written again and again, and no half of a world counts as running."""
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    await place.client.create(QUOTAS, place.namespace, quota)

    async def counted() -> bool:
        return bool((await place.client.get(QUOTAS, place.namespace, "few")).status.get("hard"))

    await eventually("the quota is in force", counted)
    await place.create_job(replicas=3)
    async with Operators(place).run() as client:

        async def says_why() -> bool:
            await place.start_all()
            conditions = {c["type"]: c for c in (await place.status()).get("conditions", ())}
            stalled = conditions.get("Stalled", {})
            return (
                stalled.get("status") == "True"
                and "exceeded quota" in stalled["message"]
                and conditions["Ready"]["reason"] == "WaitingForQuorum"
            )

        await eventually("the job says what it waits for", says_why)
        before = await place.job()
        writes = len(client.writes)
        await asyncio.sleep(2.5)  # a span in which nothing may happen: there is no condition to wait for
        assert (await place.job()).metadata.resource_version == before.metadata.resource_version
        assert len(client.writes) - writes <= 6, client.writes[writes:]
        await place.client.delete(QUOTAS, place.namespace, "few")
        # A quota that goes sends no event: the next try comes after 15 s, or with whatever happens to the job.
        await place.edit_job(ttlSecondsAfterFinished=1000)
        await place.running("digits-w0-0", "digits-w1-0", "digits-w2-0")
    assert (await place.status())["restarts"]["total"] == 0


async def test_name_that_is_taken_is_named_and_left_alone_until_it_is_free(place: Place) -> None:
    stranger = {"metadata": {"name": "digits-w1-0"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    made = await place.client.create(PODS, place.namespace, stranger)
    await place.create_job()
    async with Operators(place).run():

        async def says_which() -> bool:
            conditions = {c["type"]: c for c in (await place.status()).get("conditions", ())}
            return "Pod digits-w1-0 has a name that this job needs" in conditions.get("Stalled", {}).get("message", "")

        await eventually("the job names the pod", says_which)
        found = await place.client.get(PODS, place.namespace, "digits-w1-0")
        assert found.metadata.uid == made.metadata.uid
        await place.client.delete(PODS, place.namespace, "digits-w1-0")
        await place.running("digits-w0-0", "digits-w1-0")


async def test_one_job_whose_pods_are_refused_does_not_stop_others(place: Place) -> None:
    """Case 24: the API server takes the job, and none of its pods."""
    template = {"spec": {"containers": [{"name": "worker", "image": "train:1", "imagePullPolicy": "Sometimes"}]}}
    await place.create_job("poisoned", template=template)
    await place.create_job("digits")
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")

        async def says_why() -> bool:
            conditions = {c["type"]: c for c in (await place.status("poisoned")).get("conditions", ())}
            return "imagePullPolicy" in conditions.get("Stalled", {}).get("message", "")

        await eventually("the other job says why it stands still", says_why)
        assert await place.reason("poisoned") == "Pending"


@pytest.mark.long
async def test_namespace_that_is_going_gets_no_pods_and_goes(new_place: NewPlace) -> None:
    """Case 36: nothing of ours holds it back, and no half-deleted job is filled up again."""
    place = await new_place()
    await place.create_job()
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
        await place.client.delete(NAMESPACES, None, place.namespace)

        async def empty() -> bool:
            left = [*(await place.names()), *(await place.services())]
            jobs = (await place.client.list(JOBS, place.namespace)).items
            return not left and not jobs

        await eventually("the namespace is empty", empty)


@pytest.mark.long
async def test_status_that_a_user_emptied_is_repaired_and_rounds_go_on(place: Place) -> None:
    """Case 15."""
    await place.create_job()
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
        await place.end("digits-w1-0", 137)
        await place.running("digits-w0-1", "digits-w1-1")
        stored = await place.status()
        await place.client.patch_status(JOBS, place.namespace, "digits", dict.fromkeys(stored))
        await place.running("digits-w0-2", "digits-w1-2")
        assert (await place.status())["world"]["round"] == 3


async def test_secret_of_the_spec_appears_in_no_status_and_no_event(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 12: a program that prints its key, and fails."""
    container = {"name": "worker", "image": "t:1", "env": [{"name": "WANDB_API_KEY", "value": SECRET}]}
    await place.create_job(template={"spec": {"containers": [container]}}, recovery={"maxRestarts": 0})
    caplog.set_level("DEBUG")
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
        await place.end("digits-w1-0", 1, message=f"wandb: cannot log in with {SECRET}\nValueError: 401")

        async def failed() -> bool:
            return bool(await place.reason() == "Failed")

        async def told() -> bool:
            return "RestartBudgetExhausted" in await place.events()

        await eventually("the job failed", failed)
        await eventually("an event tells why", told)
    status = json.dumps(await place.status())
    assert "ValueError: 401" in status
    notes = [e.note for e in (await place.client.list(EVENTS, place.namespace)).items]
    assert SECRET not in status + str(notes) + caplog.text


async def test_service_that_somebody_deleted_is_made_again(place: Place) -> None:
    await place.create_job()
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
        await place.client.delete(SERVICES, place.namespace, "digits-workers")

        async def back() -> bool:
            return bool(await place.services() == ["digits-workers"])

        await eventually("the service is back", back)
    assert (await place.status())["restarts"]["total"] == 0


async def test_job_recreated_under_its_name_within_a_second_never_adopts_the_old_pods(place: Place) -> None:
    """Case 8. The old pods keep their names until garbage collection has come round."""
    await wait_until_collected(place)
    old = await place.create_job()
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
        await place.client.delete(JOBS, place.namespace, "digits", propagation="Background")
        new = await place.create_job()
        assert new.metadata.uid != old.metadata.uid
        await place.running("digits-w0-0", "digits-w1-0")
        owners = {controller_uid(pod.metadata) for pod in (await place.pods()).values()}
        status = await place.status()
    assert owners == {new.metadata.uid}
    assert (status["world"]["round"], status["restarts"]["total"]) == (1, 0)


async def test_deleted_job_leaves_nothing_behind(place: Place) -> None:
    """Case 91: in the middle of a recovery."""
    await wait_until_collected(place)
    await place.create_job()
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
        await place.end("digits-w1-0", 137)
        await place.client.delete(JOBS, place.namespace, "digits", propagation="Background")

        async def empty() -> bool:
            return not await place.names() and not await place.services()

        await eventually("pods and service are collected", empty)
