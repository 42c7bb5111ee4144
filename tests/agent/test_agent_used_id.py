"""A run whose name another run had: it must not look like success."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from everstep.contract import env
from support.rendezvous.etcd_server import EtcdCluster

pytestmark = pytest.mark.timeout(240)
FLAGS = ("--nnodes=1", "--rdzv-backend=etcd-v3")


def run(cluster: EtcdCluster, prefix: str, script: Path, *flags: str, **environ: str) -> tuple[int, str]:
    """The exit code and what was said."""
    argv = [
        "-m", "everstep.agent.main", *FLAGS, f"--rdzv-endpoint={cluster.urls[0]}",
        f"--rdzv-conf=last_call=0,prefix={prefix}", *flags, str(script),
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "EVERSTEP_PRELOAD": "", **environ},
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.fixture
def prefix() -> str:
    return f"/{uuid.uuid4().hex}"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Each time that it is run it adds a line to `ran`."""
    made = tmp_path / "train.py"
    made.write_text(f"with open({str(tmp_path / 'ran')!r}, 'a') as file:\n    file.write('once\\n')\n")
    return made


@pytest.mark.long
@pytest.mark.parametrize("flags", [("--rdzv-id=nightly",), ()])
def test_a_second_run_under_a_used_name_is_refused_with_the_remedy(
    flags: tuple[str, ...], etcd: EtcdCluster, prefix: str, script: Path
) -> None:
    assert run(etcd, prefix, script, *flags)[0] == 0
    code, said = run(etcd, prefix, script, *flags)
    assert code == 1, said
    name = "--rdzv-id=nightly;" if flags else "--rdzv-id=none (none is the default);"
    assert f"nothing was trained here: an earlier run used {name} give each run an id of its own" in said
    assert run(etcd, prefix, script, "--rdzv-id=another")[0] == 0
    assert script.with_name("ran").read_text() == "once\n" * 2


def test_a_name_of_a_run_that_failed_is_used_too(etcd: EtcdCluster, prefix: str, script: Path) -> None:
    good = script.read_text()
    script.write_text("raise ValueError('no such luck')\n")
    assert run(etcd, prefix, script)[0] == 1
    script.write_text(good)
    code, said = run(etcd, prefix, script)
    assert code == 1
    assert "ValueError: no such luck" in said, "why that run ended"
    assert "an earlier run used --rdzv-id=none" in said


@pytest.mark.long
def test_a_worker_of_a_training_job_that_comes_too_late_has_nothing_to_do(
    etcd: EtcdCluster, prefix: str, script: Path
) -> None:
    """No other job has its name."""
    job = {env.JOB_UID: "uid-1"}
    assert run(etcd, prefix, script, "--rdzv-id=uid-1", **job)[0] == 0
    code, said = run(etcd, prefix, script, "--rdzv-id=uid-1", **job)
    assert code == 0, said
    assert script.with_name("ran").read_text() == "once\n"
