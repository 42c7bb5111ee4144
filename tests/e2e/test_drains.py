"""Workers of a job of a fixed size are evicted one after the other, each time by the API that drains use: another one
takes the place at the end of a step. `EVERSTEP_DRAINS` is their number.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise

import pytest

from support.e2e.driver import Job
from support.scenarios.lines import Asked

pytestmark = [pytest.mark.kind, pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(7200)]

DRAINS = int(os.environ.get("EVERSTEP_DRAINS", "10"))
PAUSE, SECONDS = 0.05, 40.0  # of a step, and for an eviction with what it takes on a busy machine
GRACE = 120
STEP = re.compile(r"^(\S+?)(\.\d{6})?\d*Z step=(\d+) ")


def evict(job: Job, index: int) -> None:
    name = job.pod(index)["metadata"]["name"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": job.namespace}}
    path = f"/api/v1/namespaces/{job.namespace}/pods/{name}/eviction"

    def fault() -> None:
        job.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(body))

    job.inject(fault)


class Steps:
    """When the last rank had made each step, by the kubelets, which share a clock here."""

    def __init__(self, job: Job) -> None:
        self._job, self.made = job, dict[int, float]()

    def read(self) -> None:
        for name in [pod["metadata"]["name"] for pod in self._job.pods()]:
            log = self._job.kubectl("logs", name, "-c", "worker", "--timestamps", "--tail=2000", check=False)
            for line in log.splitlines():
                if found := STEP.match(line):
                    at = datetime.fromisoformat(f"{found[1]}{found[2] or ''}+00:00").timestamp()
                    self.made[int(found[3])] = max(at, self.made.get(int(found[3]), at))

    def longest(self, since: int) -> float:
        """Seconds between two steps behind this one, at most."""
        steps = sorted(step for step in self.made if step >= since)
        assert steps == list(range(steps[0], steps[-1] + 1)), "a step was printed by nobody"
        return max(self.made[b] - self.made[a] for a, b in pairwise(steps))


def test_no_step_is_repeated_when_workers_are_evicted_one_after_the_other(new_job: Callable[..., Job]) -> None:
    job = new_job()
    steps = int(DRAINS * SECONDS / PAUSE)
    job.asked = Asked(3, steps, PAUSE, 500, launcher="everstep-run", script="ledger", grace=GRACE)
    job.workers, job.sizes_seen = 3, {3}
    manifest = job.manifest(job.asked)
    manifest["spec"]["template"]["spec"]["containers"][0]["command"] += ["--print-all"]
    job.submit(manifest)
    job.until_step(20)
    pauses, made = [], Steps(job)
    for number in range(DRAINS):
        made.read()
        before = max(made.made)
        evict(job, number % 3)
        record = job.until_recovered()
        assert (record["rung"], record.get("lostSteps")) == ("migrate", 0), job.describe()
        job.until_further(10)
        made.read()
        pauses.append(made.longest(before))
        print(f"eviction {number}: {pauses[-1]:.2f} s", flush=True)
    print(f"{DRAINS} evictions: p50 {statistics.median(pauses):.2f} s, at most {max(pauses):.2f} s")
    restarts = job.status()["restarts"]
    assert (restarts.get("userCode", 0), restarts.get("total", 0)) == (0, 0), restarts
    job.kubectl("delete", "tjob", job.name, "--wait=false")
    job.verify_commits()
