"""The cluster commands of the documents, typed as they stand there, from the installation to the end of the job."""

from __future__ import annotations

import subprocess

import pytest

from support import ROOT
from support.e2e.driver import BUCKET
from support.e2e.install import install, uninstall
from support.scenarios import document
from support.scenarios.document import CLUSTER
from testcluster.handle import Cluster

LIMIT = 1500  # seconds; a job trains for five minutes, and is broken several times
JOBS = ("digits", "digits-elastic")  # also the prefix of each one's commits


@pytest.mark.long
@pytest.mark.kind
@pytest.mark.alone
@pytest.mark.timeout(LIMIT + 300)
@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("docs/tutorial.md", "condition met"),
        # It waits for the end of a job that trains for five minutes.
        ("README.md", "final step=3000"),
    ],
)
def test_cluster_commands_of_a_document_end_well_as_they_stand_there(page: str, said: str, installed: Cluster) -> None:
    cluster = installed
    commands = document.of(ROOT / page, CLUSTER)
    assert any("helm install" in command for command in commands)
    uninstall(cluster)
    _forget(cluster)
    try:
        done = subprocess.run(
            ["bash", "-c", "\n".join(["set -euxo pipefail", *commands])],
            cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        assert said in done.stdout
    finally:
        _forget(cluster)
        install(cluster)


def _forget(cluster: Cluster) -> None:
    """The jobs, and their commits: another job with their URL would go on from them, and be over at once."""
    cluster.kubectl("delete", "tjob", *JOBS, "--ignore-not-found", "--timeout=60s")
    cluster.s3.bucket(BUCKET)
    client = cluster.s3.client()
    for job in JOBS:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{job}/"):
            for item in page.get("Contents", ()):
                client.delete_object(Bucket=BUCKET, Key=item["Key"])
