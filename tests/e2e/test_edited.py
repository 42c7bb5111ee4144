"""A job is suspended, edited and resumed while no operator runs: it goes on with one program, as if undisturbed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.e2e.driver import SYSTEM, Job
from support.scenarios.player import wait_for

EDITED = {"name": "EDITED", "value": "$(EVERSTEP_WORKER_INDEX) of the second program"}


@contextmanager
def no_operator(job: Job) -> Iterator[None]:
    def operators() -> str:
        return str(job.cluster.kubectl("-n", SYSTEM, "get", "pods", "-o", "name").stdout).strip()

    def scale(replicas: int) -> None:
        done = job.cluster.kubectl("-n", SYSTEM, "scale", "deploy/everstep", f"--replicas={replicas}")
        assert done.returncode == 0, done.stderr

    scale(0)
    try:
        wait_for("no operator runs", lambda: not operators(), 60)
        yield
    finally:
        scale(2)
        job.cluster.kubectl("-n", SYSTEM, "rollout", "status", "deploy/everstep", "--timeout=60s")


def patch(job: Job, spec: dict[str, Any]) -> None:
    job.kubectl("patch", "tjob", job.name, "--type=merge", "-p", json.dumps({"spec": spec}))


def variables(pod: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pod["spec"]["containers"][0]["env"]
    return found


@pytest.mark.long
@pytest.mark.kind
@pytest.mark.alone
@pytest.mark.parametrize("backend", ["everstep", "c10d"])
def test_job_suspended_edited_and_resumed_without_an_operator_runs_one_program(
    backend: str, new_job: Callable[..., Job]
) -> None:
    job = new_job()
    launcher = "torchrun" if backend == "c10d" else "everstep-run"
    job.apply(workers=2, steps=900, pause=0.1, every=20, backend=backend, launcher=launcher)
    job.until_step(20, "checkpoint.lastCommittedStep")
    before = {pod["metadata"]["uid"] for pod in job.pods()}
    containers = json.loads(job.kubectl("get", "tjob", job.name, "-o", "json"))["spec"]["template"]["spec"][
        "containers"
    ]
    containers[0]["env"] = [*containers[0].get("env", ()), EDITED]
    with no_operator(job):
        patch(job, {"suspend": True})
        patch(job, {"suspend": False, "template": {"spec": {"containers": containers}}})
        assert {pod["metadata"]["uid"] for pod in job.pods()} == before, "somebody acted: the test shows nothing"

    def all_edited() -> bool:
        pods = job.pods()
        return len(pods) == 2 and all(EDITED in variables(pod) for pod in pods)

    job.wait("all workers are of the edited template", all_edited)
    assert not before & {pod["metadata"]["uid"] for pod in job.pods()}
    events = job.kubectl("get", "events", "-o", "jsonpath={.items[*].reason}").split()
    assert "WorkersUpdated" in events
    worker = job.pod(1)["metadata"]["name"]
    job.until_training()
    said = job.kubectl("exec", worker, "-c", "worker", "--", "printenv", "EDITED").strip()
    assert said == "1 of the second program"
    job.until_complete()
    job.expect_undisturbed()
    job.expect_restarts("total", 0)
