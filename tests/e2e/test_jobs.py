"""What needs more than one job, or none left: two jobs at once, deletion, and what kubectl shows."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable

import pytest

from support.e2e.driver import Job
from support.scenarios.player import wait_for

pytestmark = pytest.mark.kind


@pytest.mark.long
def test_two_jobs_of_one_name_disturbed_apart_do_not_meet(new_job: Callable[..., Job]) -> None:
    first, second = new_job(), new_job()
    assert first.name == second.name
    for job in (first, second):
        job.apply(workers=2, steps=450, pause=0.05, every=20)
    for job in (first, second):
        job.until_step(20, "checkpoint.lastCommittedStep")
    first.delete_pod(0)
    first.until_recovered()
    for job in (first, second):
        job.until_complete()
        job.expect_undisturbed()
    first.expect_restarts("infrastructure", 1)
    second.expect_restarts("total", 0)


@pytest.mark.long_but("no program")
@pytest.mark.parametrize(
    ("backend", "command", "words"),
    [
        (
            "c10d",
            ["torchrun", "nofile.py"],
            "can't open file '/workspace/nofile.py': [Errno 2] No such file or directory",
        ),
        (
            "everstep",
            ["everstep-run", "nofile.py"],
            "can't open file '/workspace/nofile.py': No such file or directory",
        ),
        ("everstep", ["no-such-program"], "executable file not found in $PATH"),
    ],
    ids=["torchrun", "everstep-run", "no program"],
)
def test_program_that_is_not_there_ends_the_job_with_its_words(
    new_job: Callable[..., Job], backend: str, command: list[str], words: str
) -> None:
    job = new_job()
    manifest = job.elastic(steps=1, pause=0.0)
    spec = manifest["spec"]
    del spec["elastic"]
    spec |= {"replicas": 2, "rendezvous": {"backend": backend}}
    spec["template"]["spec"]["containers"][0]["command"] = command
    job.submit(manifest)
    job.until_condition("Failed")
    failure = job.status()["failure"]
    assert failure["message"].startswith("CannotStart: worker "), failure
    assert words in failure["message"]
    assert words in job.kubectl("describe", "tjob", job.name)


@pytest.mark.long
def test_running_job_deleted_leaves_nothing_behind(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.apply(workers=2, steps=2000, pause=0.05, every=20)
    job.until_step(20, "checkpoint.lastCommittedStep")
    job.kubectl("delete", "tjob", job.name, "--timeout=60s")

    def left() -> list[str]:
        kinds = "pods,services,endpoints,configmaps,secrets,leases,poddisruptionbudgets,persistentvolumeclaims"
        items = json.loads(job.kubectl("get", kinds, "-o", "json"))["items"]
        ours = {"kube-root-ca.crt", "s3-credentials"}
        return [f"{i['kind']}/{i['metadata']['name']}" for i in items if i["metadata"]["name"] not in ours]

    wait_for("everything of the job is gone", lambda: not left(), 60)
    # And the name is free at once: the new job is a new one, over the same commits.
    again = Job(job.cluster, job.namespace, job.name)
    again.apply(workers=2, steps=300, pause=0.0, every=50)
    again.until_complete()
    again.expect_samples()


@pytest.mark.long
def test_kubectl_get_and_describe_read_as_designed(new_job: Callable[..., Job]) -> None:
    job = new_job(name=f"look-{secrets.token_hex(2)}")
    job.apply(workers=2, steps=300, pause=0.05, every=20)
    job.until_step(20, "checkpoint.lastCommittedStep")
    head, row = job.kubectl("get", "tjob").splitlines()
    columns = dict(zip(head.split(), row.split(), strict=False))
    assert head.split() == [
        "NAME",
        "STATUS",
        "READY",
        "DESIRED",
        "MIN",
        "MAX",
        "STEP",
        "CKPT",
        "RESTARTS",
        "GOODPUT",
        "AGE",
    ]
    assert (columns["NAME"], columns["STATUS"], columns["READY"], columns["DESIRED"]) == (job.name, "Running", "2", "2")
    wide = job.kubectl("get", "tjob", "-o", "wide").splitlines()[0].split()
    assert wide[-4:] == ["ROUND", "LAST-FAILURE", "ETA", "IMAGE"]
    job.delete_pod(1)
    job.until_recovered()
    parts = ("WorkerLost", "PodDeleted", "WorkerReplaced", "WorldFormed", "Lost Steps", "Rung:")

    def said() -> bool:  # an event is posted after the status was written
        text = job.kubectl("describe", "tjob", job.name)
        return all(part in text for part in parts)

    wait_for(f"describe says {', '.join(parts)}", said, 30)
    job.until_complete()
