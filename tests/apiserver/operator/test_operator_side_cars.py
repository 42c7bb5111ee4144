"""Pods with side-cars at a real API server: the worker's own container decides, and a pod that was told to end."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everstep_operator.kube.resources import PODS, Resource
from everstep_operator.kube.wire import KubeObject, Unstructured, rfc3339
from support.apiserver.operators import Operators, Place
from support.apiserver.waiting import eventually

pytestmark = pytest.mark.apiserver
BINDINGS = Resource("", "v1", "bindings", "Binding", KubeObject)
FULL_PODS = Resource("", "v1", "pods", "Pod", Unstructured)
WORKERS = ("digits-w0-0", "digits-w1-0")
MESH = {"name": "mesh", "image": "mesh:1"}
LOGS = {"name": "logs", "image": "logs:1"}
NATIVE = {"name": "proxy", "image": "proxy:1", "restartPolicy": "Always"}
Json = dict[str, Any]


def template(*side_cars: Json, native: Json | None = None) -> Json:
    worker = {"name": "worker", "image": "train:1", "command": ["torchrun", "train.py"]}
    spec: Json = {"containers": [*side_cars, worker], "terminationGracePeriodSeconds": 1}
    return {"spec": {**spec, "initContainers": [native]} if native else spec}


def container(name: str, code: int | None, ended: datetime | None = None) -> Json:
    """`code` None: it runs."""
    now = datetime.now(UTC)
    state: Json = {"running": {"startedAt": rfc3339(now)}}
    if code is not None:
        state = {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": rfc3339(ended or now)}}
    shown = {"name": name, "image": "x:1", "imageID": "", "restartCount": 0}
    return {**shown, "ready": code is None, "state": state}


async def tell(place: Place, pod: str, worker: int | None, native: Json | None = None, **side_cars: int | None) -> None:
    """The containers of a pod, as a kubelet writes them."""
    states = {"worker": worker, **side_cars}
    codes = [c for c in states.values() if c is not None]
    phase = "Running" if len(codes) < len(states) else "Failed" if any(codes) else "Succeeded"
    ready = "False" if codes else "True"
    status: Json = {
        "phase": phase,
        "conditions": [{"type": t, "status": ready} for t in ("ContainersReady", "Ready")],
        "containerStatuses": [container(name, code) for name, code in states.items()],
    }
    if native is not None:
        status["initContainerStatuses"] = [{**container("proxy", None), **native}]
    await place.set_pod(pod, status)


async def complete(place: Place) -> None:
    async def holds() -> bool:
        return await place.reason() == "Complete"

    await eventually("the job is complete", holds)


async def gone(place: Place, *names: str) -> None:
    async def holds() -> bool:
        return not set(names) & set(await place.names())

    await eventually(f"{names} are deleted", holds)


@pytest.mark.long_but("side_cars1-states1-c10d")
@pytest.mark.parametrize("backend", ["c10d", "everstep"])
@pytest.mark.parametrize(
    ("side_cars", "states"),
    [
        ((MESH,), {"mesh": None}),
        ((MESH,), {"mesh": 137}),
        ((MESH, LOGS), {"mesh": None, "logs": 1}),
    ],
)
async def test_side_cars_neither_keep_a_job_alive_nor_fail_it(
    place: Place, backend: str, side_cars: tuple[Json, ...], states: Json
) -> None:
    await place.create_job(template=template(*side_cars), rendezvous={"backend": backend}, podCleanup="None")
    async with Operators(place).run():

        async def created() -> bool:
            return await place.names() == list(WORKERS)

        await eventually("the workers are there", created)
        for pod in WORKERS:
            await tell(place, pod, None, **dict.fromkeys(states))
        for pod in WORKERS:
            await tell(place, pod, None, **states)
        for pod in WORKERS:
            await tell(place, pod, 0, **states)
        await complete(place)
        assert (await place.status())["restarts"]["total"] == 0
        if None in states.values():
            await gone(place, *WORKERS)  # side-cars would run for ever, whatever podCleanup says
        else:
            assert await place.names() == list(WORKERS)


async def test_failed_worker_beside_a_side_car_that_runs_is_replaced_and_charged(place: Place) -> None:
    await place.create_job(template=template(MESH), recovery={"backoffSeconds": {"initial": 0, "max": 0}})
    async with Operators(place).run():
        await place.running(*WORKERS)
        await tell(place, WORKERS[1], 1, mesh=None)
        await place.running("digits-w0-1", "digits-w1-1")
        status = await place.status()
    assert (status["restarts"]["userCode"], status["recoveries"][0]["cause"]) == (1, "Error")


async def test_native_side_car_and_ephemeral_container_say_nothing_about_the_worker(place: Place) -> None:
    await place.create_job(template=template(native=NATIVE))
    async with Operators(place).run():
        await place.running(*WORKERS)
        debugger = {"name": "debugger", "image": "busybox"}
        for pod in WORKERS:
            body = {"spec": {"ephemeralContainers": [debugger]}}
            await place.client.merge_patch(PODS, place.namespace, f"{pod}/ephemeralcontainers", body)
            killed = container("proxy", 137)
            await tell(place, pod, None, native=killed)
            await place.set_pod(pod, {"ephemeralContainerStatuses": [container("debugger", None)]})
        assert await place.reason() == "Running"
        for pod in WORKERS:
            await tell(place, pod, 0, native={"ready": True})
        await complete(place)
        assert (await place.status())["restarts"]["total"] == 0


@pytest.mark.parametrize("answer", ["same second", "later"])
async def test_exit_0_of_a_drained_pod_is_no_success(place: Place, answer: str) -> None:
    """The pod is held by a finalizer, as by a kubelet that has yet to end it."""
    await place.create_job(replicas=1)
    pod = WORKERS[0]
    async with Operators(place).run():
        await place.running(pod)
        await place.client.merge_patch(
            PODS, place.namespace, pod, {"metadata": {"finalizers": ["test.everstep.dev/kubelet"]}}
        )
        told = datetime.fromtimestamp(int(time.time()), UTC)
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
                     "lastTransitionTime": rfc3339(told)}  # fmt: skip
        ended = told if answer == "same second" else told + timedelta(seconds=2)
        shown = {"phase": "Succeeded", "conditions": [condition, {"type": "Ready", "status": "False"}],
                 "containerStatuses": [container("worker", 0, ended)]}  # fmt: skip
        await place.set_pod(pod, shown)

        async def replaced() -> bool:
            return "digits-w0-1" in await place.names()

        await eventually("the worker is replaced", replaced)
        await place.client.merge_patch(PODS, place.namespace, pod, {"metadata": {"finalizers": None}})
        status = await place.status()
    assert (status["restarts"]["userCode"], status["restarts"]["preemption"]) == (0, 1)


@pytest.mark.long
async def test_pod_that_a_node_rejects_is_followed_by_one_that_prefers_others(place: Place) -> None:
    await place.create_job(replicas=1, recovery={"maxRestarts": 0, "noProgressLimit": 1})
    async with Operators(place).run():
        await place.running(WORKERS[0])
        for number in range(2):
            pod = f"digits-w0-{number}"
            binding = {"metadata": {"name": pod}, "target": {"kind": "Node", "name": "n1"}}
            await place.client.create(BINDINGS, place.namespace, binding)
            message = "Allocate failed due to no healthy devices present"
            shown = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message}
            await place.set_pod(pod, {**shown, "containerStatuses": [], "conditions": []})

            async def followed(name: str = f"digits-w0-{number + 1}") -> bool:
                return await place.names() == [name]

            await eventually("another pod comes", followed)
        status = await place.status()
        follower = await place.client.get(FULL_PODS, place.namespace, "digits-w0-2")
    assert (status["restarts"]["userCode"], status["restarts"]["infrastructure"]) == (0, 2)
    assert status["restarts"]["rejectedBy"] == ["n1"]
    [term] = follower.spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["preference"]["matchFields"] == [{"key": "metadata.name", "operator": "NotIn", "values": ["n1"]}]
