"""An elastic job on a cluster: pods are deleted by force, and the others train on in their processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from support.e2e.driver import Job
from support.scenarios.player import wait_for

pytestmark = [pytest.mark.kind, pytest.mark.turns(2), pytest.mark.timeout(420)]


def trains(job: Job, size: int, after: int) -> dict[str, Any]:
    """Wait until a round newer than `after` of this size makes steps; the status then."""

    def found() -> dict[str, Any] | None:
        status = job.status()
        world = status.get("world", {})
        formed = world.get("size") == size and world.get("formedRound", 0) > after
        ready = next((c for c in status.get("conditions", ()) if c["type"] == "Ready"), {})
        return status if formed and ready.get("reason") in ("Running", "RunningDegraded") else None

    return wait_for(f"a round after {after} of {size}\n{job.describe()}", found, 180)  # type: ignore[arg-type]


def test_pods_deleted_by_force_are_replaced_one_at_a_time_and_the_others_keep_their_processes(
    new_job: Callable[..., Job],
) -> None:
    job = new_job()
    job.submit(job.elastic(1300, 0.05))
    world = trains(job, 3, 0)["world"]
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
