"""An elastic TrainingJob in local mode: `everstep run elastic.yaml`, the operator's round store, `everstep-run`, the
session. (That workers are killed and added while the others train on in their processes is `make demo`'s test.)"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from everstep.jobs.history import EventSeen, History, StatusSeen
from support.local.elastic_rows import taken, worker_logs
from support.scenarios.reference import EXAMPLE

pytestmark = pytest.mark.timeout(240)


def play(tmp_path: Path, steps: int, *at: str) -> tuple[list[object], dict[str, str]]:
    """The example for so many steps, with these faults: its history, and the log of each pod."""
    job = yaml.safe_load((EXAMPLE / "elastic.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    script = str(EXAMPLE / "elastic.py")
    # Each step is printed: a worker may be back before ten were taken without it.
    lines = ["--step-seconds", "0.03", "--print-every", "1"]
    container["command"] = ["everstep-run", script, "--steps", str(steps), *lines]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    out = tmp_path / "out"
    done = subprocess.run(
        [
            sys.executable, "-m", "everstep.cli.main", "run", str(tmp_path / "job.yaml"), "--plain", "--out", str(out),
            "--checkpoint", str(tmp_path / "commits"), *(f"--at={one}" for one in at),
        ],
        capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return list(History.load(out / "history.jsonl")), worker_logs(out)


@pytest.mark.long
def test_workers_that_are_scaled_away_leave_at_the_end_of_a_step(tmp_path: Path) -> None:
    history, logs = play(tmp_path, 300, "60:scale=2")
    reasons = [e.reason for e in history if isinstance(e, EventSeen)]
    assert "WorldResized" in reasons
    assert not {"WorkerLost", "RestoredFromCheckpoint"} & set(reasons), reasons
    sizes = [e.size for e in history if isinstance(e, StatusSeen)]
    assert sizes[-1] == 2
    assert set(logs) == {f"digits-elastic-w{i}-0" for i in range(3)}, "no worker was started again"
    rows = taken(logs)
    assert sorted(step for step, _, _ in rows) == list(range(1, 301)), "no step was taken twice, none left out"
    assert {world for _, world, _ in rows} == {2, 3}
    assert len({pid for _, _, pid in rows}) == 1, "rank 0 was never started again"
    left = re.findall(r"left after step (\d+), the others train on", logs["digits-elastic-w2-0"])
    assert len(left) == 1
    assert not any("committed" in log and "asked to stop" in log for log in logs.values()), "nobody else stopped"
