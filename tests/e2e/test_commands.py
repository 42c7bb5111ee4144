"""The commands about jobs on a cluster with nodes: logs, waits, and a worker that is killed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from everstep.jobs.source import JobError
from support.commands import caller
from support.e2e.driver import SYSTEM, Job

pytestmark = pytest.mark.kind


def test_commands_of_a_person_follow_a_job_on_a_cluster_and_change_it(new_job: Callable[..., Job]) -> None:
    job = new_job()
    call = caller("-n", job.namespace, "--kubeconfig", str(job.cluster.kubeconfig))
    manifest = job.elastic(steps=100_000, pause=0.02)
    manifest["spec"]["replicas"] = 2
    job.submit(manifest)
    job.until_step(20)
    shown = json.loads(call("status", job.name, "-o", "json"))
    assert {row["state"] for row in shown["workers"]} == {"training"}
    assert call("list").splitlines()[1].split()[:2] == [job.name, "Running"]
    assert len(call("logs", job.name, "0", "--tail", "2").splitlines()) == 2
    pod = next(row["pod"] for row in shown["workers"] if row["worker"] == 1)
    shared = job.kubectl("exec", pod, "-c", "worker", "--", "df", "-m", "--output=size", "/dev/shm")
    assert int(shared.split()[-1]) > 64, "the size that a container runtime gives, in MiB"
    assert call("kill", job.name, "1").startswith(f"pod {pod} deleted by force (namespace {job.namespace} of ")
    job.until_recovered()
    assert "WorkerLost" in [row["reason"] for row in json.loads(call("events", job.name, "-o", "json"))]
    assert call("suspend", job.name).startswith(f"{job.name}: suspended (")
    assert job.pod_names() == []
    assert call("resume", job.name).startswith(f"{job.name}: trains again (")
    assert job.status()["world"]["size"] >= 2
    call("delete", job.name)
    with pytest.raises(JobError, match=f"no job '{job.name}'"):
        call("status", job.name)


def test_helm_test_passes_on_a_cluster_that_enforces_network_policies(new_job: Callable[..., Job]) -> None:
    shown = new_job().cluster.helm(
        "--namespace", SYSTEM, "test", "everstep", "--logs", "--timeout", "120s", timeout=180
    )
    assert "Phase:          Succeeded" in shown
    assert shown.count("ok    ") == 3
