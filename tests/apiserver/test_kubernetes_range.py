"""The oldest and the newest Kubernetes that Everstep is for take what the tests' own one takes.

The tests of CRD, chart, policies and operator are played again, each time over a control plane whose API server is of
that version.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from testcluster import programs, versions

pytestmark = [pytest.mark.apiserver, pytest.mark.long, pytest.mark.timeout(2400)]

PLAYED = (
    "test_admission_chart.py", "test_chart_switches.py", "test_admission_documents.py",
    "test_admission_policy.py", "test_admission_schema.py",
    "test_admission_stored.py", "test_install_manifest.py", "test_installation_check.py", "test_monitoring_chart.py",
    "test_cluster_commands.py", "operator/test_operator_jobs.py", "operator/test_operator_rerun.py",
    "operator/test_operator_rounds.py", "operator/test_operator_network_policy.py", "kube/test_kube_requests.py",
)  # fmt: skip
SECONDS = 2200.0


def play(version: str, folder: Path) -> None:
    """Play them over the programs of a control plane whose API server is of this version, as envtest's users have
    them."""
    assets = folder / "assets"
    assets.mkdir()
    for name, program in {**programs.control_plane(), "kube-apiserver": programs.api_server(version)}.items():
        (assets / name).symlink_to(program)
    environment = {**os.environ, programs.ASSETS: str(assets)}
    server = [str(assets / "kube-apiserver"), "--version"]
    assert subprocess.run(server, capture_output=True, text=True, timeout=60, check=True).stdout.endswith(
        f"v{version}\n"
    )
    played = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *PLAYED],
        cwd=ROOT / "tests/apiserver",
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert played.returncode == 0, played.stdout[-6000:] + played.stderr[-1000:]
    assert re.search(r"\b\d{3} passed", played.stdout), played.stdout[-500:]


@pytest.mark.usefixtures("control_plane", "oldest_api_server")
def test_oldest_kubernetes_takes_crd_chart_and_policies_and_the_operator_works_there(tmp_path: Path) -> None:
    play(versions.OLDEST_KUBERNETES, tmp_path)


@pytest.mark.usefixtures("control_plane", "newest_api_server")
def test_newest_kubernetes_takes_crd_chart_and_policies_and_the_operator_works_there(tmp_path: Path) -> None:
    play(versions.NEWEST_KUBERNETES, tmp_path)
