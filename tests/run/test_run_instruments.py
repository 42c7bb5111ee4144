"""What a second terminal can learn of the processes of a local run: memory, stacks, a profile."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from everstep.instruments.live_profile import summarize
from everstep.storage import open_store
from support.local.local_job import LocalJob
from support.scenarios.player import wait_for

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).with_name("instruments_script.py")
BIN = Path(sys.executable).parent
# In place of kubectl: the pods are this machine's, and a command in a pod's container runs here.
KUBECTL = """#!/bin/sh
echo "$@" >> {calls}
[ "$1" = --namespace ] && [ "$2" = team ] || {{ echo "no such namespace" >&2; exit 1; }}
shift 2
if [ "$1" = get ]; then echo pod/instruments-w0-0; exit 0; fi
shift 5
exec "$@"
"""


def everstep(job: LocalJob, *arguments: str, environment: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    found = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"}
    return subprocess.run(
        [sys.executable, "-m", "everstep.cli.main", *arguments],
        capture_output=True, text=True, timeout=200, check=False,
        env={**found, "TMPDIR": str(job.temporary), **environment},
    )  # fmt: skip


def answers(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
def test_terminal_beside_a_run_sees_memory_and_the_rank_that_all_others_wait_for(
    new_job: Callable[..., LocalJob], tmp_path: Path
) -> None:
    job = new_job(name="instruments")
    sleeper = tmp_path / "sleeper"
    options = ["--workers", "2", "--elastic", "2:2", "--out", str(job.out), "--checkpoint", job.url, "--plain"]
    job.start(str(SCRIPT), "--name", job.name, *options, "--", str(sleeper))
    wait_for("steps of both", lambda: len([r for r in job.view().get("workers", ()) if r["step"]]) == 2, 240)

    held = [row["memory"] for row in job.view()["workers"]]
    assert all(2**25 < one < 2**34 for one in held), held

    sleeper.write_text("1")
    found: list[dict[str, Any]] = []

    def waits() -> bool:
        found[:] = answers(everstep(job, "stacks", job.name, "--output", "jsonl"))
        return len(found) == 2 and found[0]["waits"] and "wait_while" in found[1]["at"]

    wait_for("rank 0 to wait for rank 1", waits, 60)
    assert [one["rank"] for one in found] == [0, 1]
    assert found[1]["waits"] is False
    assert "instruments_script.py" in found[1]["stacks"]
    assert found[1]["pod"] == "instruments-w1-0"

    shown = everstep(job, "stacks", job.name).stdout
    assert "rank 1, pod instruments-w1-0" in shown
    assert "in wait_while" in shown

    # The same through kubectl, whose `exec` runs `everstep stacks` beside the agent.
    stub, calls = tmp_path / "kubectl", tmp_path / "calls"
    stub.write_text(KUBECTL.format(calls=calls))
    stub.chmod(0o700)
    path = {"PATH": f"{tmp_path}:{BIN}:{os.environ['PATH']}"}
    of_pods = answers(everstep(job, "stacks", job.name, "-n", "team", "-o", "jsonl", environment=path))
    assert {one["rank"] for one in of_pods} == {0, 1}
    assert f"get pods -l everstep.dev/job={job.name}" in calls.read_text()
    refused = everstep(job, "stacks", job.name, "-n", "other", environment=path)
    assert refused.returncode == 2
    assert "no such namespace" in refused.stderr

    sleeper.unlink()
    traced = answers(everstep(job, "profile", job.name, "--steps", "4", "--id", "first", "-o", "jsonl"))
    assert [one["rank"] for one in traced] == [0, 1]
    for one in traced:
        assert one["steps"] == 4
        assert one["last"] - one["first"] == 4
        assert 0 < one["communication"] < 1
        assert 0 < one["input"] < 1
        assert 0 <= one["overlap"] <= 1
        assert one["step_seconds"] > 0.02, "the script sleeps so long in each step"
        kept = f"profiles/first/rank-{one['rank']}.json.gz"
        assert one["trace"] == f"{job.url}/{kept}"
        events = json.loads(gzip.decompress(open_store(job.url).get(kept)))["traceEvents"]
        assert summarize(events).communication == pytest.approx(one["communication"])

    table = everstep(job, "profile", job.name, "--steps", "2").stdout
    assert "COMMUNICATION" in table
    assert f"{job.url}/profiles/" in table

    nobody = everstep(job, "stacks", "another")
    assert nobody.returncode == 2
    assert "no agent of a job 'another' runs on this machine" in nobody.stderr
