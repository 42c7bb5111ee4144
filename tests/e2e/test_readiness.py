"""A real kubelet and stock torchrun: pods and job are Ready when the workers have joined, and not when they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.e2e.driver import Job
from support.scenarios.player import wait_for

pytestmark = pytest.mark.kind

LATE = 'if [ "$EVERSTEP_WORKER_INDEX" = 1 ]; then until [ -e /tmp/go ]; do sleep 0.2; done; fi; exec "$@"'


def is_ready(conditions: list[dict[str, Any]]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


@pytest.mark.long
def test_c10d_job_is_ready_when_its_last_worker_has_joined(new_job: Callable[..., Job]) -> None:
    job = new_job()
    manifest = job.elastic(steps=200, pause=0.05)
    spec = manifest["spec"]
    del spec["elastic"]
    spec |= {"replicas": 2, "rendezvous": {"backend": "c10d"}}
    worker = spec["template"]["spec"]["containers"][0]
    worker["command"] = ["sh", "-c", LATE, "sh", "torchrun", *worker["command"][1:]]
    job.submit(manifest)

    def all_run() -> list[dict[str, Any]] | None:
        found = job.pods()
        return found if [p["status"]["phase"] for p in found] == ["Running"] * 2 else None

    pods = wait_for("both containers run", all_run, 120)
    wait_for("the job says what it waits for", lambda: "have not joined a round" in str(job.status()), 30)
    assert not any(is_ready(p["status"]["conditions"]) for p in pods)
    assert not is_ready(job.status()["conditions"])
    (late,) = [p for p in pods if p["metadata"]["labels"]["everstep.dev/worker-index"] == "1"]
    job.kubectl("exec", late["metadata"]["name"], "-c", "worker", "--", "touch", "/tmp/go")
    wait_for("the job is Ready", lambda: is_ready(job.status()["conditions"]), 120)
    events = job.kubectl("get", "events", "-o", "jsonpath={.items[*].reason}")
    assert "Unhealthy" not in events
    job.until_complete()
    assert job.status()["restarts"]["total"] == 0
