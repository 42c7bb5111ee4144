"""Local mode: pods of several containers, and programs that end with 0 because they are told to end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from support.local.local_job import LocalJob
from support.scenarios.player import wait_for

pytestmark = [pytest.mark.timeout(200)]
# Ends with 0 as soon as it is told to, without a word to anybody.
OBEDIENT = "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); time.sleep(600)"


def manifest(job: LocalJob, backend: str, program: str, *side_cars: dict[str, Any]) -> dict[str, Any]:
    worker = {"name": "worker", "image": "local", "command": [sys.executable, "-c", program]}
    pods = {"containers": [*side_cars, worker], "terminationGracePeriodSeconds": 5}
    spec = {"replicas": 1, "rendezvous": {"backend": backend}, "template": {"spec": pods}}
    kind = {"apiVersion": "everstep.dev/v1alpha1", "kind": "TrainingJob"}
    return {**kind, "metadata": {"name": job.name}, "spec": spec}


@pytest.mark.long
@pytest.mark.parametrize("backend", ["everstep", "c10d"])
@pytest.mark.parametrize("side_car", [["sleep", "infinity"], ["sh", "-c", "exit 137"]])
def test_job_whose_worker_ended_with_0_beside_a_side_car_is_complete(
    new_job: Callable[..., LocalJob], backend: str, side_car: list[str]
) -> None:
    job = new_job()
    mesh = {"name": "mesh", "image": "local", "command": side_car}
    job.submit(manifest(job, backend, "import time; time.sleep(3)", mesh))
    job.until_complete(60)
    job.expect_restarts("total", 0)


@pytest.mark.long_but("everstep")
@pytest.mark.parametrize("backend", ["everstep", "c10d"])
def test_exit_0_because_the_pod_is_deleted_or_the_job_suspended_is_no_success(
    new_job: Callable[..., LocalJob], backend: str
) -> None:
    job = new_job()
    job.submit(manifest(job, backend, OBEDIENT))

    def has_one_that_runs(but: str = "") -> bool:
        return any(w["pod"] != but and w["pid"] for w in job.view().get("workers", ()))

    wait_for("a worker runs", has_one_that_runs, 60)
    first = job.worker(0)["pod"]
    job.delete_pods([0])
    wait_for("another worker runs", lambda: has_one_that_runs(first), 60)
    job.suspend(True)
    wait_for("no worker is left", lambda: not job.view()["workers"], 60)
    assert job.view()["status"] == "Suspended"
    job.suspend(False)
    wait_for("a worker is back", has_one_that_runs, 60)
    job.expect_restarts("infrastructure", 1)
    job.expect_restarts("userCode", 0)
