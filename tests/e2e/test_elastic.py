"""An elastic job on a cluster: pods are deleted by force, and the others train on in their processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from support.e2e.driver import Job
from support.scenarios.player import wait_for
from testcluster import programs

pytestmark = pytest.mark.kind


def trains(job: Job, size: int, after: int) -> dict[str, Any]:
    """Wait until a round newer than `after` of this size makes steps; the status then."""

    def found() -> dict[str, Any] | None:
        status = job.status()
        world = status.get("world", {})
        formed = world.get("size") == size and world.get("formedRound", 0) > after
        ready = next((c for c in status.get("conditions", ()) if c["type"] == "Ready"), {})
        return status if formed and ready.get("reason") in ("Running", "RunningDegraded") else None

    return wait_for(f"a round after {after} of {size}\n{job.describe()}", found, 180)  # type: ignore[arg-type]


def asked(job: Job, *command: str) -> list[dict[str, Any]]:
    """What the job's pods answer to an `everstep` command, which asks them through kubectl."""
    path = f"{programs.kubernetes()}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "everstep.cli.main", *command, job.name, "-n", job.namespace, "--output", "jsonl"],
        env={**os.environ, "KUBECONFIG": str(job.cluster.kubeconfig), "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def expect_instruments(job: Job) -> None:
    """Stacks and a profile of each rank, and the traces in the job's storage, while it trains on."""
    stacks = asked(job, "stacks")
    assert [answer["rank"] for answer in stacks] == [0, 1, 2]
    assert all("elastic.py" in answer["stacks"] for answer in stacks), stacks
    traces = asked(job, "profile", "--steps", "5", "--seconds", "60")
    assert [answer["rank"] for answer in traces] == [0, 1, 2]
    for answer in traces:
        assert answer["trace"].startswith(f"{job.url}/profiles/"), answer
        assert answer["steps"] == 5, answer
        bucket, _, key = answer["trace"].removeprefix("s3://").partition("/")
        assert job.cluster.s3.client().get_object(Bucket=bucket, Key=key)["ContentLength"] > 1000


@pytest.mark.long
def test_pods_deleted_by_force_are_replaced_one_at_a_time_and_the_others_keep_their_processes(
    new_job: Callable[..., Job],
) -> None:
    job = new_job()
    job.submit(job.elastic(1300, 0.05))
    world = trains(job, 3, 0)["world"]
    expect_instruments(job)
    for index in (1, 0):  # rank 0, and with it the host of the round's store, too
        before = job.newest_pods()
        job.kubectl("delete", "pod", before[index]["metadata"]["name"], "--force", "--grace-period=0")
        world = trains(job, 3, world["round"])["world"]
        after = job.newest_pods()
        assert after[index]["metadata"]["name"] != before[index]["metadata"]["name"]
        for other in set(before) - {index}:
            assert after[other]["metadata"]["uid"] == before[other]["metadata"]["uid"]
            assert after[other]["status"]["containerStatuses"][0]["restartCount"] == 0
        job.until_apart()
    job.kubectl("scale", f"tjob/{job.name}", "--replicas=4")
    trains(job, 4, world["round"])
    job.until_complete()
    status = job.status()
    assert status["restarts"].get("userCode", 0) == 0
    assert status["restarts"]["infrastructure"] == 2
    events = job.describe()
    for reason in ("WorkerLost", "WorldResized", "WorldFormed"):
        assert reason in events, events
    logs = "".join(job.kubectl("logs", pod["metadata"]["name"], "-c", "worker") for pod in job.newest_pods().values())
    (accuracy,) = re.findall(r"final step=1300 test_accuracy=([\d.]+)", logs)
    assert float(accuracy) >= 0.95
