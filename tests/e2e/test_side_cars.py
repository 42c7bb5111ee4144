"""Pods of several containers on real kubelets, and programs that end with 0 because their pod was told to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from support.e2e.driver import Job
from support.scenarios.player import wait_for

pytestmark = pytest.mark.kind
GRACE = 5
# Ends with 0 as soon as it is told to end, long before its work is done.
OBEDIENT = "trap 'exit 0' TERM; while true; do sleep 0.2; done"


def container_named(pod: dict[str, Any], name: str) -> dict[str, Any]:
    status = pod["status"]
    kinds = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")
    every = [one for kind in kinds for one in status.get(kind, ())]
    found: dict[str, Any] = next((c for c in every if c["name"] == name), {"state": {}})
    return found


def debug(job: Job, image: str) -> None:
    """An ephemeral container in each pod, as `kubectl debug` makes it; it fails."""
    body = {"name": "debugger", "image": image, "imagePullPolicy": "IfNotPresent", "command": ["sh", "-c", "exit 1"]}
    patch = json.dumps({"spec": {"ephemeralContainers": [body]}})
    for pod in job.pods():
        job.kubectl("patch", "pod", pod["metadata"]["name"], "--subresource=ephemeralcontainers", "-p", patch)

    def ended() -> bool:
        return all("terminated" in container_named(p, "debugger")["state"] for p in job.pods())

    wait_for("the ephemeral containers have ended", ended, 60)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["everstep", "c10d"])
def test_side_cars_neither_keep_a_job_alive_nor_fail_it(new_job: Callable[..., Job], backend: str) -> None:
    """A plain side-car that never ends, one that fails while the worker trains, and a native one; a worker fails."""
    job = new_job()
    manifest = job.elastic(steps=150, pause=0.05)
    spec = manifest["spec"]
    del spec["elastic"]
    spec |= {"replicas": 2, "rendezvous": {"backend": backend}}
    pods = spec["template"]["spec"]
    pods["terminationGracePeriodSeconds"] = GRACE
    worker = pods["containers"][0]
    if backend == "c10d":
        worker["command"][0] = "torchrun"
    image = {"image": worker["image"], "imagePullPolicy": worker.get("imagePullPolicy", "IfNotPresent")}
    forever = [{"name": "mesh", **image, "command": ["sleep", "infinity"]}]
    failing = [{"name": "logs", **image, "command": ["sh", "-c", "sleep 3; exit 137"]}]
    # What is injected may well come first.
    pods["containers"] = [*forever, worker, *failing]
    pods["initContainers"] = [{"name": "proxy", **image, "command": ["sleep", "infinity"], "restartPolicy": "Always"}]
    job.submit(manifest)
    job.until_step(20)
    debug(job, worker["image"])

    def side_cars_failed() -> bool:
        return all("terminated" in container_named(p, "logs")["state"] for p in job.pods())

    wait_for("the side-cars have failed", side_cars_failed, 60)
    assert job.status()["restarts"]["total"] == 0
    job.kill_torchrun(1)
    job.until_recovered()
    job.until_complete()
    assert job.status()["restarts"]["total"] == 1
    # Only side-cars are left: they get their grace period, and then their pods are deleted.
    wait_for("the pods are gone", lambda: job.pods() == [], 60)


@pytest.mark.long_but("c10d")
@pytest.mark.parametrize("backend", ["everstep", "c10d"])
def test_exit_0_because_of_an_eviction_or_a_suspension_is_no_success(new_job: Callable[..., Job], backend: str) -> None:
    job = new_job()
    manifest = job.elastic(steps=1, pause=0.0)
    spec = manifest["spec"]
    del spec["elastic"]
    spec |= {"replicas": 1, "rendezvous": {"backend": backend}}
    spec["template"]["spec"]["containers"][0]["command"] = ["sh", "-c", OBEDIENT]
    job.submit(manifest)

    def runs() -> str | None:
        """Its pod, since a job without agents forms no world."""
        alive = job.newest_pods()
        return str(alive[0]["metadata"]["name"]) if 0 in alive and alive[0]["status"]["phase"] == "Running" else None

    first = wait_for("the worker runs", runs, 120)
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": first, "namespace": job.namespace}}
    path = f"/api/v1/namespaces/{job.namespace}/pods/{first}/eviction"
    job.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(body))

    def replaced() -> bool:
        return runs() not in (None, first)

    wait_for("the worker is replaced", replaced, 60)
    restarts = job.status()["restarts"]
    assert (restarts["userCode"], restarts["preemption"]) == (0, 1), restarts
    job.suspend(True)
    job.until_condition("Suspended")
    wait_for("the pods are gone", lambda: job.pods() == [], 60)
    job.suspend(False)
    wait_for("the worker is back", lambda: bool(job.newest_pods()), 60)
    complete = [c["status"] for c in job.status()["conditions"] if c["type"] == "Complete"]
    assert complete == ["False"]


def with_init(job: Job, **init: Any) -> dict[str, Any]:
    """A job of one worker with an init container."""
    manifest = job.elastic(steps=1, pause=0.0)
    spec = manifest["spec"]
    del spec["elastic"]
    pods = spec["template"]["spec"]
    worker = pods["containers"][0]
    spec |= {"replicas": 1, "recovery": {"maxRestarts": 0}}
    pods["initContainers"] = [{"name": "fetch", "image": worker["image"], "imagePullPolicy": "IfNotPresent", **init}]
    return manifest


def condition(job: Job, type_: str) -> dict[str, Any]:
    return next((c for c in job.status().get("conditions", ()) if c["type"] == type_), {})


@pytest.mark.long
def test_init_container_that_fails_is_named_with_its_exit_code_and_its_last_line(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.submit(with_init(job, command=["sh", "-c", "echo first; echo why; exit 3"]))
    job.until_condition("Failed")
    failure = job.status()["failure"]
    assert (failure["cause"], failure["exitCode"]) == ("StartFailed", 3)
    assert "init container fetch ended with exit code 3: why" in failure["message"]
    assert failure["logLines"][-1] == "why"


@pytest.mark.long
def test_init_container_whose_image_cannot_be_pulled_is_told_in_one_event(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.submit(with_init(job, image="registry.invalid/no/such:image"))
    words = "init container fetch: ImagePullBackOff: "

    def told() -> bool:
        return all(words in condition(job, type_).get("message", "") for type_ in ("Ready", "Stalled"))

    wait_for("the status says what cannot be pulled", told, 120)
    assert condition(job, "Stalled")["status"] == "True"
    events = json.loads(job.kubectl("get", "events.events.k8s.io", "-o", "json"))["items"]
    assert [e["reason"] for e in events if e["regarding"]["kind"] == "TrainingJob"].count("WorkerWaits") == 1
    assert job.status()["restarts"]["total"] == 0


@pytest.mark.long
def test_volume_that_does_not_mount_is_told_with_the_words_of_its_event(new_job: Callable[..., Job]) -> None:
    job = new_job()
    manifest = job.elastic(steps=1, pause=0.0)
    del manifest["spec"]["elastic"]
    manifest["spec"]["replicas"] = 1
    pods = manifest["spec"]["template"]["spec"]
    pods["volumes"] = [{"name": "keys", "secret": {"secretName": "missing"}}]
    pods["containers"][0]["volumeMounts"] = [{"name": "keys", "mountPath": "/keys"}]
    job.submit(manifest)
    words = 'FailedMount: MountVolume.SetUp failed for volume "keys" : secret "missing" not found'
    wait_for("the status says why", lambda: words in condition(job, "Ready").get("message", ""), 120)
    job.kubectl("create", "secret", "generic", "missing")
    job.until_complete()
