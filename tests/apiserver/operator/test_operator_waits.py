"""Workers that wait for something outside of them, at a real API server: what the status says, and who is charged."""

from __future__ import annotations

import time
from typing import Any

import pytest

from everstep_operator.kube.resources import EVENTS, PODS, SERVICES, Resource
from everstep_operator.kube.wire import Unstructured
from support.apiserver.operators import TEMPLATE, Operators, Place
from support.apiserver.quotas import QUOTAS, allow_none
from support.apiserver.waiting import eventually

pytestmark = pytest.mark.apiserver

NO_NODE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
        }
    ],
}


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


async def test_rendezvous_that_times_out_for_want_of_a_node_is_neither_charged_nor_counted(place: Place) -> None:
    """Worker 0 waits for worker 1, which finds no node, and gives up: more often than noProgressLimit allows."""
    await place.create_job(recovery={"noProgressLimit": 2})
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
        await place.end("digits-w1-0", 137)
        for round_ in range(1, 5):
            await there(place, f"digits-w0-{round_}", f"digits-w1-{round_}")
            await place.set_pod(f"digits-w1-{round_}", NO_NODE)
            await place.start(f"digits-w0-{round_}")
            await place.end(f"digits-w0-{round_}", 1, message="RendezvousTimeoutError")
        await there(place, "digits-w0-5", "digits-w1-5")
        status = await place.status()
        assert {r["cause"] for r in status["recoveries"]} == {"PeerMissing", "Signaled"}
        assert status["restarts"]["userCode"] == 0
        assert status["restarts"].get("withoutProgress", 0) <= 1  # the kill
        await place.running("digits-w0-5", "digits-w1-5")


async def there(place: Place, *names: str) -> None:
    async def holds() -> bool:
        return await place.names() == sorted(names)

    await eventually(f"exactly {names} exist", holds)


@pytest.mark.long
async def test_suspended_time_counts_towards_no_deadline(place: Place) -> None:
    """Suspended for longer than activeDeadlineSeconds, with another operator that resumes it."""
    await place.create_job(activeDeadlineSeconds=6)
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
        begun = (await place.status())["startTime"]
        await place.edit_job(suspend=True)
        await eventually("the job is suspended", lambda: reads(place, "Suspended"))
        assert "startTime" not in await place.status()
    ended = time.monotonic() + 7
    await eventually("the deadline would be over", lambda: time.monotonic() > ended)
    async with Operators(place).run():
        await place.edit_job(suspend=False)
        await place.running("digits-w0-2", "digits-w1-2")
        status = await place.status()
        assert status["startTime"] > begun
        assert status["earlierActiveSeconds"] <= 6
        await eventually("the deadline ends the job that is active for as long", lambda: reads(place, "Failed"))


def container(name: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state}


async def test_init_container_that_fails_is_named_with_its_exit_code_and_last_line_and_is_charged(place: Place) -> None:
    await place.create_job(recovery={"maxRestarts": 0})
    ended = {"exitCode": 3, "reason": "Error", "message": "fetching\nOSError: no such bucket", "finishedAt": now()}
    async with Operators(place).run():
        await there(place, "digits-w0-0", "digits-w1-0")
        status = {
            "phase": "Failed",
            "initContainerStatuses": [container("fetch", terminated=ended)],
            "containerStatuses": [container("worker", waiting={"reason": "PodInitializing"})],
        }
        await place.set_pod("digits-w1-0", status)
        await eventually("the job ends", lambda: reads(place, "Failed"))
        failure = (await place.status())["failure"]
    assert (failure["cause"], failure["exitCode"]) == ("StartFailed", 3)
    assert "init container fetch ended with exit code 3: OSError: no such bucket" in failure["message"]


WAITING = [
    (
        {"initContainerStatuses": [container("fetch", waiting={"reason": "ImagePullBackOff", "message": "no image"})]},
        "init container fetch: ImagePullBackOff: no image",
    ),
    (
        {
            "initContainerStatuses": [
                {
                    **container("proxy", waiting={"reason": "CrashLoopBackOff", "message": "back-off"}),
                    "lastState": {"terminated": {"exitCode": 2, "reason": "Error", "message": "a\nbad flag --x"}},
                }
            ]
        },
        "init container proxy: CrashLoopBackOff: exit code 2 (Error): bad flag --x",
    ),
    (
        {"containerStatuses": [container("logs", waiting={"reason": "ErrImagePull", "message": "denied"})]},
        "container logs: ErrImagePull: denied",
    ),
    (
        {"containerStatuses": [container("worker", waiting={"reason": "CreateContainerConfigError", "message": "no"})]},
        "CreateContainerConfigError: no",
    ),
]


@pytest.mark.parametrize(("status", "words"), WAITING, ids=[words for _, words in WAITING])
async def test_container_that_cannot_start_is_told_in_the_status_and_in_one_event(
    place: Place, status: dict[str, Any], words: str
) -> None:
    await place.create_job()
    async with Operators(place).run():
        await there(place, "digits-w0-0", "digits-w1-0")
        await place.start("digits-w0-0")
        await place.set_pod("digits-w1-0", {"phase": "Pending", **status})

        async def told() -> bool:
            found = conditions(await place.status())
            stalled = found.get("Stalled", {})
            ready = found.get("Ready", {}).get("message", "")
            return bool(stalled.get("status") == "True" and words in stalled["message"] and words in ready)

        await eventually(f"the status says: {words}", told)

        async def one_event() -> bool:
            return (await place.events()).count("WorkerWaits") == 1

        await eventually("one event tells it", one_event)
        assert (await place.status())["restarts"].get("total", 0) == 0


async def reads(place: Place, reason: str) -> bool:
    return await place.reason() == reason


def conditions(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["type"]: c for c in status.get("conditions", ())}


async def stalled(place: Place) -> str:
    """What keeps the job from going on by itself; empty if nothing does."""
    found = conditions(await place.status()).get("Stalled", {})
    return str(found["message"]) if found.get("status") == "True" else ""


@pytest.mark.long
async def test_object_beside_the_pods_that_a_quota_refuses_is_told_with_its_name_and_its_reason(place: Place) -> None:
    await allow_none(place, "services", SERVICES, {"spec": {"clusterIP": "None"}})
    await place.create_job()
    async with Operators(place).run():
        words = "the API server refuses to create Service digits-workers: "

        async def told() -> bool:
            said = await stalled(place)
            return said.startswith(words) and "exceeded quota: none" in said

        await eventually("the status says what is refused and why", told)

        async def one_event() -> bool:
            return (await place.events()).count("CreateRefused") == 1

        await eventually("one event tells it", one_event)
        assert await place.names() == []  # its pods would not find each other
        await place.client.delete(QUOTAS, place.namespace, "none")
        await place.running("digits-w0-0", "digits-w1-0")
        assert await stalled(place) == ""


@pytest.mark.long
async def test_worker_that_a_quota_refuses_is_told_with_its_age_in_one_event(place: Place) -> None:
    await allow_none(place, "pods", PODS, {"spec": TEMPLATE["spec"]})
    await place.create_job()
    async with Operators(place).run():

        async def told() -> bool:
            return "exceeded quota: none" in await stalled(place)

        await eventually("the status says what is refused and why", told)
        status = await place.status()
        since = status["refusedSince"]
        begun = f"the API server refuses to create a worker since {since[11:19]} UTC: "
        assert conditions(status)["Stalled"]["message"].startswith(begun)
        assert begun in conditions(status)["Ready"]["message"]

        async def event() -> bool:
            return "WorkerWaits" in await place.events()

        await eventually("an event tells it", event)  # it is written behind the status
        await place.edit_job(ttlSecondsAfterFinished=1000)
        await eventually("another pass has tried it", lambda: observed(place, 2))
        assert (await place.events()).count("WorkerWaits") == 1
    # Another operator has not tried it: the wait keeps its beginning.
    async with Operators(place).run():
        await place.edit_job(ttlSecondsAfterFinished=2000)
        await eventually("the edit was seen", lambda: observed(place, 3))
        await eventually("the status says so again", told)
        assert (await place.status())["refusedSince"] == since
        await place.client.delete(QUOTAS, place.namespace, "none")
        await place.running("digits-w0-0", "digits-w1-0")
        assert "refusedSince" not in await place.status()


async def observed(place: Place, generation: int) -> bool:
    return (await place.status()).get("observedGeneration") == generation


@pytest.mark.long
async def test_worker_that_a_quota_refuses_for_longer_than_a_start_may_take_ends_its_job(place: Place) -> None:
    await allow_none(place, "pods", PODS, {"spec": TEMPLATE["spec"]})
    await place.create_job(recovery={"startTimeoutSeconds": 10, "noProgressLimit": 1})
    async with Operators(place).run():
        await eventually("the job ends", lambda: reads(place, "Failed"))
        failed = conditions(await place.status())["Failed"]
        assert failed["reason"] == "StartTimedOut"
        assert "not started in 10 s (spec.recovery.startTimeoutSeconds): it cannot be created: " in failed["message"]
        assert "exceeded quota: none" in failed["message"]


async def test_name_held_by_a_pod_that_does_not_end_is_told_with_its_age(place: Place) -> None:
    """An earlier job's pod, whose kubelet is gone. (A finalizer holds it here.)"""
    left = {"metadata": {"name": "digits-w0-0", "finalizers": ["example.com/held"]}, "spec": TEMPLATE["spec"]}
    await place.client.create(PODS, place.namespace, left)
    await place.client.delete(PODS, place.namespace, "digits-w0-0", grace_seconds=0)
    await place.create_job()
    async with Operators(place).run():

        async def told() -> bool:
            said = await stalled(place)
            whose = "Pod digits-w0-0 has a name that this job needs, and is being deleted"
            return all(part in said for part in (whose, time.strftime("%Y-"), "--force"))

        await eventually("the status says who has the name, since when, and what to do", told)
        await place.client.merge_patch(PODS, place.namespace, "digits-w0-0", {"metadata": {"finalizers": None}})
        await place.running("digits-w0-0", "digits-w1-0")


@pytest.mark.long
async def test_worker_that_does_not_start_in_time_is_replaced_uncharged(place: Place) -> None:
    await place.create_job(recovery={"startTimeoutSeconds": 10})
    async with Operators(place).run():
        await there(place, "digits-w0-0", "digits-w1-0")
        await place.set_pod("digits-w1-0", NO_NODE)
        await place.start("digits-w0-0")
        await there(place, "digits-w0-1", "digits-w1-1")
        status = await place.status()
        assert status["recoveries"][0]["cause"] == "StartTimeout"
        assert (status["restarts"]["userCode"], status["restarts"]["startTimeouts"]) == (0, 1)

        async def told() -> bool:
            events = (await place.client.list(EVENTS, place.namespace)).items
            why = "not started in 10 s (spec.recovery.startTimeoutSeconds): it cannot be scheduled: 0/2 nodes"
            return any(event.reason == "WorkerLost" and why in str(event.note) for event in events)

        await eventually("an event says why", told)  # it is written behind the status
        await place.running("digits-w0-1", "digits-w1-1")


async def test_job_is_ready_when_its_workers_have_joined_and_not_when_their_containers_run(place: Place) -> None:
    """Under c10d: what `kubectl wait --for=condition=Ready` and GitOps read."""
    await place.create_job()
    names = ("digits-w0-0", "digits-w1-0")
    async with Operators(place).run():
        await there(place, *names)
        for name in names:
            runs = {**container("worker", running={"startedAt": now()}), "started": False}
            unready = [{"type": t, "status": "False"} for t in ("ContainersReady", "Ready")]
            await place.set_pod(name, {"phase": "Running", "conditions": unready, "containerStatuses": [runs]})

        async def joining() -> bool:
            ready = conditions(await place.status()).get("Ready", {})
            return ready.get("status") == "False" and "2 have not joined a round" in ready["message"]

        await eventually("the job says that its workers have not joined", joining)
        assert await place.reason() == "Pending"
        (probe,) = [c["startupProbe"] for c in (await raw_pod(place, names[0]))["containers"] if c["name"] == "worker"]
        assert probe["exec"]["command"][0] == "/bin/sh"
        for name in names:
            await place.set_pod(name, {"containerStatuses": None})
            await place.start(name)
        await eventually("the job runs", lambda: reads(place, "Running"))
        assert (await place.status())["restarts"].get("total", 0) == 0


async def raw_pod(place: Place, name: str) -> dict[str, Any]:
    """The spec of a pod as the API server stores it."""
    stored = Resource("", "v1", "pods", "Pod", Unstructured)
    return (await place.client.get(stored, place.namespace, name)).spec
