"""The vertical gate: the node that holds the operator's leader and worker 0, or all workers, is killed in the middle of
a save; then the job is suspended and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from driver import BUCKET, SYSTEM, Job
from player import ScenarioError, wait_for
from testcluster.handle import Cluster
from testcluster.proc import run

ATTEMPTS = 3


def node_of_leader(job: Job) -> str:
    done = job.cluster.kubectl("-n", SYSTEM, "get", "pod", job.leader(), "-o", "jsonpath={.spec.nodeName}")
    return str(done.stdout).strip()


def bring_leader_to(job: Job, node: str) -> None:
    """Take the other leader away until the replica on `node` leads. Replicas prefer different nodes."""

    def leads_there() -> bool:
        if node_of_leader(job) == node:
            return True
        job.cluster.kubectl("-n", SYSTEM, "delete", "pod", job.leader(), "--wait=true")
        job.cluster.kubectl("-n", SYSTEM, "rollout", "status", "deploy/everstep", "--timeout=60s")
        return False

    wait_for(f"the leader is on {node}", leads_there, 120, poll=1)


def saves(job: Job) -> tuple[set[str], set[str]]:
    """Save ids that have objects, and those that were committed, as a third party reads the bucket."""
    client = job.cluster.s3.client()
    prefix = job.url.removeprefix(f"s3://{BUCKET}/")
    keys = [
        item["Key"].removeprefix(prefix + "/")
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix + "/")
        for item in page.get("Contents", ())
    ]
    started = {key.split("/")[1] for key in keys if key.startswith("data/")}
    committed = set()
    for key in sorted(k for k in keys if k.startswith("log/"))[-40:]:
        record = json.loads(client.get_object(Bucket=BUCKET, Key=f"{prefix}/{key}")["Body"].read().splitlines()[0])
        committed |= {record["save_id"]} if record["kind"] == "commit" else set()
    return started, committed


@contextmanager
def store_that_does_not_answer(job: Job) -> Iterator[None]:
    """What is written meanwhile is under way until the end of it: the server's process stands still."""
    found = job.cluster.kubectl("-n", "s3", "get", "pod", "-l", "app=s3", "-o", "jsonpath={.items[0].spec.nodeName}")
    server = ("docker", "exec", str(found.stdout).strip(), "pkill")
    run(*server, "-STOP", "versitygw")
    try:
        yield
    finally:
        run(*server, "-CONT", "versitygw")


def kill_mid_save(job: Job, node: str) -> bool:
    """Kill the node; whether a save was then under way that no commit record names."""
    job.killed_nodes.append(node)
    with store_that_does_not_answer(job):
        job.until_step(job.status()["checkpoint"]["lastCommittedStep"] + 5)
        job.inject(lambda: job.cluster.kill_node(node))

    def torn() -> bool:
        started, committed = saves(job)
        return bool(started - committed)

    try:
        return wait_for("a save without a commit", torn, 3)
    except ScenarioError:
        return False


@pytest.mark.kind
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "together"), [("digits", False), ("ledger", True)], ids=["worker 0", "all workers, of the session"]
)
def test_node_of_leader_and_workers_killed_mid_save_then_suspended_ends_as_undisturbed(
    installed: Cluster, new_job: Callable[..., Job], script: str, together: bool
) -> None:
    job = new_job()
    job.apply(workers=2, steps=900, pause=0.05, every=1, script=script, together=together)
    for attempt in range(ATTEMPTS):
        job.until_step(20 * (attempt + 1), "checkpoint.lastCommittedStep")
        node = job.pod(0)["spec"]["nodeName"]
        bring_leader_to(job, node)
        job.until_step(job.status()["checkpoint"]["lastCommittedStep"] + 5, "checkpoint.lastCommittedStep")
        if kill_mid_save(job, node):
            break
        job.until_recovered()
        job.start_nodes()
    else:
        pytest.fail(f"none of {ATTEMPTS} kills hit a save under way: the workload no longer saves all the time")
    record = job.until_recovered()
    assert record["cause"] == "NodeLost"
    job.start_nodes()
    job.suspend(True)
    job.wait("no pods", lambda: not job.pods())
    job.suspend(False)
    job.until_training()
    job.until_complete(seconds=300)
    job.expect_undisturbed()
    job.expect_restarts("userCode", 0)
