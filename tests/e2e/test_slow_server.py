"""The installed operator on a cluster whose creates take seconds: it leads on, and jobs start and recover."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from support.e2e.driver import LEASE, SYSTEM, Job
from support.e2e.slow_webhook import slow_creates
from support.scenarios.player import wait_for

CREATE_SECONDS = 2.5
TOGETHER, SMALL = 2, 2  # jobs that are created at once, and their workers
PARKED, LARGE = 4, 90  # jobs whose pods no node takes, and their workers: they keep the operator creating
OBSERVED = 3 * 6  # seconds: three terms of the Lease of a new installation
MANY = 16  # creates that wait at a time


def lease(job: Job) -> tuple[str, int]:
    """Who leads, and how often that has changed."""
    done = job.cluster.kubectl("-n", SYSTEM, "get", "lease", LEASE, "-o", "json")
    spec: dict[str, Any] = json.loads(done.stdout)["spec"]
    return str(spec["holderIdentity"]), int(spec.get("leaseTransitions") or 0)


def parked(job: Job) -> dict[str, Any]:
    """Pods cost the operator and the API server what all pods cost, and no node anything."""
    manifest = job.elastic(steps=1, pause=0.0)
    spec = manifest["spec"]
    del spec["elastic"]
    spec["replicas"] = LARGE
    spec["template"]["spec"]["nodeSelector"] = {"everstep-test/nowhere": "true"}
    return manifest


@pytest.mark.kind
@pytest.mark.long  # 150 s
@pytest.mark.alone  # it takes the operator's slots for creates from every test beside it
def test_leader_leads_and_a_worker_is_replaced_while_creates_take_seconds(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    running = new_job("running")
    with slow_creates(running.cluster, running.namespace, CREATE_SECONDS, tmp_path) as reviews:
        running.apply(workers=2, steps=600, pause=0.1, every=20)
        running.until_step(20)
        since, before = datetime.now(UTC), lease(running)
        large = [new_job(f"large{number}", running.namespace) for number in range(PARKED)]
        small = [new_job(f"small{number}", running.namespace) for number in range(TOGETHER)]
        for job in large:
            job.submit(parked(job))
        for job in small:
            job.apply(workers=SMALL, steps=200, pause=0.02, every=50)
        wait_for("many creates wait", lambda: reviews.most_waiting() >= MANY, 60)
        began = time.monotonic()
        running.kill_torchrun(1)
        running.until_recovered()
        replaced = [name for name, waiting in reviews.lines() if name.startswith("running-w1-") and waiting >= MANY]
        assert replaced, "the replacement was not among many creates that waited"
        for job in small:
            job.until_complete()
        running.until_complete()
        wait_for("the time that is observed", lambda: time.monotonic() - began > OBSERVED, OBSERVED + 1)
        asked = {name for name, _ in reviews.lines()}
        assert {f"{job.name}-w{index}-0" for job in small for index in range(SMALL)} <= asked
        assert lease(running) == before
    running.expect_restarts("total", 1)
    running.expect_undisturbed()
    for job in small:
        job.expect_undisturbed()
    # A leader that lost its Lease and took it again is the same holder.
    leader = before[0].split("_")[0]
    said = running.cluster.kubectl("-n", SYSTEM, "logs", leader, f"--since-time={since.isoformat()}").stdout
    assert not [line for line in said.splitlines() if "term ended" in line or "lease attempt failed" in line], said
