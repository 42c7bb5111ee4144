"""The operator is upgraded under a running job, to a newer version with a newer CRD, and back again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.e2e.driver import SYSTEM, Job
from support.e2e.install import CHART, LIMIT, RELEASE, helm, install
from testcluster import project
from testcluster.handle import Cluster
from testcluster.proc import run

NEWER = f"{project.OPERATOR.rpartition(':')[0]}:newer"
VERSION = "9.0.0"
FIELD = "onlyNewer"  # of a job's spec, in the newer CRD alone
PAUSE = 0.05
REST = 150.0  # seconds of training for an upgrade, a lost process, the way back, and a machine that does much else


def newer_chart(folder: Path) -> str:
    """This checkout's chart as a later version, whose CRD knows one field more."""
    shutil.copytree(CHART, folder)
    about = folder / "Chart.yaml"
    about.write_text(yaml.safe_dump({**yaml.safe_load(about.read_text()), "version": VERSION, "appVersion": VERSION}))
    crd = folder / "files" / "crd.yaml"
    body = yaml.safe_load(crd.read_text())
    fields_of_spec(body)[FIELD] = {"type": "string"}
    crd.write_text(yaml.safe_dump(body))
    return str(folder)


def fields_of_spec(crd: dict[str, Any]) -> dict[str, Any]:
    (version,) = crd["spec"]["versions"]
    fields: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    return fields


@pytest.mark.kind
@pytest.mark.alone
@pytest.mark.long
def test_operator_upgraded_and_rolled_back_under_a_running_job_ends_no_process_and_repeats_no_step(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = new_job()
    run("docker", "tag", project.OPERATOR, NEWER)
    job.cluster.load(NEWER)
    job.apply(workers=2, steps=int(REST / PAUSE), pause=PAUSE, every=200, script="ledger")
    job.until_step(20)
    before, processes = job.containers(), job.told("start")
    assert len(before) == 2
    try:
        helm(
            job.cluster, SYSTEM, "upgrade", RELEASE, newer_chart(tmp_path / "everstep"), "--reset-then-reuse-values",
            "--set", "image.tag=newer", "--set", "leaseSeconds=9", "--wait", "--timeout", LIMIT,
        )  # fmt: skip
        expect_release(job.cluster, NEWER, newer=True)
        shown = helm(job.cluster, SYSTEM, "test", RELEASE, "--logs", "--timeout", LIMIT)
        assert shown.count("ok    ") == 3
        goes_on(job)
        assert (job.containers(), job.told("start")) == (before, processes)
        # The new operator does not only look on: a process that is lost now is back.
        job.lose_processes(1)
        job.expect_restarts("userCode", 0)
        kept, processes = job.containers(), job.told("start")
        helm(job.cluster, SYSTEM, "rollback", RELEASE, "--wait", "--timeout", LIMIT)
        expect_release(job.cluster, project.OPERATOR, newer=False)
        goes_on(job)
        assert (job.containers(), job.told("start")) == (kept, processes)
    finally:
        install(job.cluster)
    job.until_complete(seconds=360)
    job.expect_undisturbed()
    assert job.told("start") == processes
    job.expect_restarts("userCode", 0)


def goes_on(job: Job) -> None:
    """The operator that leads now says newer steps."""
    reached = job.newest_step()
    job.wait("the operator says newer steps", lambda: job.reached("progress.step") > reached)


def expect_release(cluster: Cluster, image: str, newer: bool) -> None:
    """All replicas run this image, and the API server serves the CRD of this version."""
    label = ("-l", "app.kubernetes.io/component=operator")
    pods = json.loads(cluster.kubectl("-n", SYSTEM, "get", "pods", *label, "-o", "json").stdout)["items"]
    alive = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    assert {pod["spec"]["containers"][0]["image"] for pod in alive} == {image}
    crd = json.loads(cluster.kubectl("get", "crd", "trainingjobs.everstep.dev", "-o", "json").stdout)
    assert (FIELD in fields_of_spec(crd)) == newer
