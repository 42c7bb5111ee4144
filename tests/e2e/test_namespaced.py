"""A release for one namespace, in that namespace, with the values that the documents have for people without rights
beyond it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from support import ROOT
from support.e2e.driver import Job
from support.e2e.install import CHART, LIMIT, RELEASE, build_of, helm, install, uninstall
from testcluster import project
from testcluster.handle import Cluster

pytestmark = [pytest.mark.kind, pytest.mark.alone]

PAGE = (ROOT / "docs/how-to-install.md").read_text().partition("## In some namespaces")[2].partition("\n## ")[0]
_, VALUES = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def team(installed: Cluster, tmp_path: Path) -> Iterator[Job]:
    """A job's namespace with an operator of its own, which is the only one of the cluster."""
    job = Job(installed, f"e2e-{secrets.token_hex(3)}", "digits")
    job.prepare()
    (tmp_path / "values.yaml").write_text(VALUES)
    uninstall(installed)
    try:
        helm(
            installed, job.namespace, "install", RELEASE, CHART, "-f", str(tmp_path / "values.yaml"),
            "--set", f"watchNamespaces={{{job.namespace}}},image.tag=dev", *build_of(project.OPERATOR),
            "--wait", "--timeout", LIMIT,
        )  # fmt: skip
        yield job
        uninstall(installed, namespace=job.namespace)
    finally:
        job.remove()
        install(installed)


@pytest.mark.long
def test_job_trains_and_recovers_under_an_operator_that_has_rights_in_its_namespace_alone(team: Job) -> None:
    began = datetime.now(UTC)
    helm(team.cluster, team.namespace, "test", RELEASE, "--logs")
    team.submit(team.elastic(steps=600, pause=0.05))
    team.until_step(20)
    team.delete_pod(1)
    team.until_recovered()
    team.until_complete()
    calls = [
        event
        for event in team.cluster.calls_of(f"system:serviceaccount:{team.namespace}:everstep")
        if datetime.fromisoformat(event["requestReceivedTimestamp"]) >= began
    ]
    refused = {
        event["requestURI"] for event in calls if event["annotations"]["authorization.k8s.io/decision"] != "allow"
    }
    assert refused == set()
    beyond = {event["requestURI"] for event in calls if event.get("objectRef", {}).get("namespace") != team.namespace}
    assert beyond == {"/openid/v1/jwks"}
