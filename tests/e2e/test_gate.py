"""The vertical gate: the node that holds the operator's leader and worker 0, or all workers, is killed in the middle of
a save; then the job is suspended and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from support.e2e.driver import BUCKET, SYSTEM, Job
from support.scenarios.player import wait_for
from testcluster.handle import Cluster
from testcluster.proc import run

WORKERS = 2
MOMENTS = 40  # at which the store is stopped, until it is so in the middle of a save
NEWEST = 40  # records of the log


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


def committed(job: Job) -> set[str]:
    """The ids of the saves that the newest records of the log name, as a third party reads the bucket."""
    client = job.cluster.s3.client()
    prefix = job.url.removeprefix(f"s3://{BUCKET}/")
    keys = [
        item["Key"]
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/log/")
        for item in page.get("Contents", ())
    ]
    records = (
        json.loads(client.get_object(Bucket=BUCKET, Key=key)["Body"].read().splitlines()[0])
        for key in sorted(keys)[-NEWEST:]
    )
    return {record["save_id"] for record in records if record["kind"] == "commit"}


class StoppedStore:
    """The store's process stands still: what is written meanwhile is under way until it goes on.

    Its objects are files on a node, where they can be looked at while it does not answer.
    """

    def __init__(self, job: Job) -> None:
        found = job.cluster.kubectl(
            "-n", "s3", "get", "pod", "-l", "app=s3", "-o", "jsonpath={.items[0].spec.nodeName}"
        )
        self._node = ("docker", "exec", str(found.stdout).strip())
        self._folder = f"/var/lib/everstep-s3/{BUCKET}/{job.url.removeprefix(f's3://{BUCKET}/')}/data"

    def __enter__(self) -> StoppedStore:
        run(*self._node, "pkill", "-STOP", "versitygw")
        return self

    def __exit__(self, *_: object) -> None:
        run(*self._node, "pkill", "-CONT", "versitygw")

    def incomplete(self) -> set[str]:
        """The ids of saves that have objects, but not yet what each rank writes last. Rank 0 asks for that before it
        commits, so no commit of them can be among the requests that the store has yet to answer."""
        files = run(*self._node, "find", self._folder, "-type", "f", "-printf", "%P\n").split()
        objects: dict[str, set[str]] = {}
        for save_id, _, name in (file.partition("/") for file in files):
            objects.setdefault(save_id, set()).add(name)
        last = {f"{rank:05}.json" for rank in range(WORKERS)}
        return {
            save_id
            for save_id, names in objects.items()
            if not last <= names and not any(name.startswith("deleting") for name in names)
        }


def kill_mid_save(job: Job, node: str) -> str:
    """Kill the node while a save is under way; the id of that save."""
    for _ in range(MOMENTS):
        done = committed(job)
        with StoppedStore(job) as store:
            if under_way := store.incomplete() - done:
                job.killed_nodes.append(node)
                job.inject(lambda: job.cluster.kill_node(node))
                return min(under_way)
        job.until_step(job.status()["checkpoint"]["lastCommittedStep"] + 1, "checkpoint.lastCommittedStep")
    pytest.fail(f"no save was under way at any of {MOMENTS} moments: the workload no longer saves all the time")


@pytest.mark.long_but("worker 0")
@pytest.mark.kind
@pytest.mark.alone
@pytest.mark.parametrize(
    ("script", "together"), [("digits", False), ("ledger", True)], ids=["worker 0", "all workers, of the session"]
)
def test_node_of_leader_and_workers_killed_mid_save_then_suspended_ends_as_undisturbed(
    installed: Cluster, new_job: Callable[..., Job], script: str, together: bool
) -> None:
    job = new_job()
    job.apply(workers=WORKERS, steps=900, pause=0.05, every=1, script=script, together=together)
    job.until_step(20, "checkpoint.lastCommittedStep")
    node = job.pod(0)["spec"]["nodeName"]
    bring_leader_to(job, node)
    job.until_step(job.status()["checkpoint"]["lastCommittedStep"] + 5, "checkpoint.lastCommittedStep")
    torn = kill_mid_save(job, node)
    record = job.until_recovered()
    assert record["cause"] == "NodeLost"
    assert torn not in committed(job)
    job.start_nodes()
    job.suspend(True)
    job.wait("no pods", lambda: not job.pods())
    job.suspend(False)
    job.until_training()
    job.until_complete(seconds=300)
    job.expect_undisturbed()
    job.expect_restarts("userCode", 0)
