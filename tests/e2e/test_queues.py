"""Kueue's own controller before a cluster with nodes: a job waits for quota, grows into it, gives all back when it is
evicted, and goes on from the step at which it left, on the nodes of its flavor.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.apiserver.queues import Queue, make_queue
from support.e2e.driver import Job
from support.e2e.install import install
from support.scenarios.lines import Asked
from support.scenarios.player import wait_for
from testcluster import programs
from testcluster.handle import Cluster
from testcluster.kueue import Kueue

pytestmark = [pytest.mark.kind, pytest.mark.alone, pytest.mark.long]

CPU = 50  # thousandths, which each worker asks for
GROWS = 10.0  # seconds: ADR 0068
KINDS = ("workloads", "localqueues", "clusterqueues", "resourceflavors")


@pytest.fixture
def kueue(installed: Cluster, kueue_programs: None, tmp_path: Path) -> Iterator[Kueue]:
    server = Kueue(installed, tmp_path / "kueue", ("TrainingJob.v1alpha1.everstep.dev",))
    server.start()
    install(installed, "kueue.enabled=true")
    yield server
    install(installed)
    for kind in KINDS:  # while Kueue is there: it has finalizers on them
        installed.kubectl("delete", f"{kind}.kueue.x-k8s.io", "--all", "-A", "--timeout=60s")
    server.stop()
    installed.kubectl("delete", "-f", str(programs.kueue_kinds()), "--timeout=60s")


def label_nodes(job: Job, label: str) -> None:
    for node in job.node_names():
        done = job.cluster.kubectl("label", "node", node, label, "--overwrite")
        assert done.returncode == 0, done.stderr


def size(job: Job) -> int:
    return int((job.status().get("world") or {}).get("size") or 0)


def ready(job: Job) -> tuple[str, str]:
    (found,) = [c for c in job.status().get("conditions", ()) if c["type"] == "Ready"] or [{}]
    return found.get("reason", ""), found.get("message", "")


def set_quota(queue: Queue, workers: int) -> None:
    (group,) = queue.get("clusterqueue", queue.namespace)["spec"]["resourceGroups"]
    group["flavors"][0]["resources"][0]["nominalQuota"] = f"{workers * CPU}m"
    queue.change("clusterqueue", queue.namespace, {"spec": {"resourceGroups": [group]}})


def test_queued_job_waits_grows_is_evicted_and_ends_as_if_undisturbed(
    new_job: Callable[..., Job], kueue: Kueue
) -> None:
    job = new_job()
    queue = make_queue(job.cluster, kueue, job.namespace, f"{2 * CPU}m", memory="100Gi")
    label_nodes(job, f"pool={job.namespace}")
    try:
        # Another has all of the quota.
        queue.apply(queue.workload("first", 2, cpu=f"{CPU}m"))
        queue.until("the first is admitted", lambda: queue.holds("first", "Admitted"))
        job.asked = Asked(4, 1500, 0.05, 100, launcher="everstep-run", script="ledger", sizes="2:4")
        job.workers, job.sizes_seen = 4, {4}
        manifest = job.manifest(job.asked)
        manifest["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "queue"}
        job.submit(manifest)
        job.wait("the job waits", lambda: ready(job)[0] == "Queued" and "insufficient" in ready(job)[1])
        assert job.pods() == []

        # It ends: there is quota for two of the four.
        queue.delete("first")
        job.until_step(20)
        assert size(job) == 2
        (selector,) = {json.dumps(pod["spec"]["nodeSelector"]) for pod in job.pods()}
        assert json.loads(selector) == {"pool": job.namespace}
        containers = job.containers()

        # More quota: it grows, and who trains keeps the process.
        before = time.monotonic()
        set_quota(queue, 4)
        job.wait("four train", lambda: size(job) == 4, 60)
        print(f"from 2 to 4 workers in {time.monotonic() - before:.1f} s")
        assert {name: job.containers()[name] for name in containers} == containers
        job.until_further(20)

        # A job of a higher priority: it leaves at its step, and waits.
        queue.apply(queue.workload("urgent", 3, cpu=f"{CPU}m", priority=100))

        def left() -> bool:
            job.said = max(job.said, job.newest_step())
            return not job.pods()

        before = time.monotonic()
        job.wait("its pods are gone", left)
        queue.until("the urgent one is admitted", lambda: queue.holds("urgent", "Admitted"))
        print(f"admitted {time.monotonic() - before:.1f} s after it was made")
        assert ready(job)[0] == "Queued"
        job.expect_kept()
        committed = job.reached("checkpoint.lastCommittedStep")

        # There is room again.
        queue.delete("urgent")
        job.wait("it trains on", lambda: size(job) == 4 and job.reached("progress.step") > committed)
        job.until_complete(420)
        job.expect_samples()
        job.expect_outcome()
        assert job.status()["restarts"].get("total", 0) == 0
        wait_for("its quota is given back", lambda: used(queue) == "0", 60)
    finally:
        label_nodes(job, "pool-")


def used(queue: Queue) -> str:
    (flavor,) = queue.get("clusterqueue", queue.namespace)["status"]["flavorsUsage"]
    return str(next(each["total"] for each in flavor["resources"] if each["name"] == "cpu"))
