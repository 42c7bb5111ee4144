"""A script that the session refuses, in local mode: the job fails at once, in the session's words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep_local.run.history import EventSeen, History

pytestmark = pytest.mark.timeout(240)

SCRIPT = """
import os
import torch
from torch.nn.parallel import DistributedDataParallel
import everstep

with open("starts", "a") as file:
    file.write(os.environ["EVERSTEP_WORKER_INDEX"] + "\\n")
with everstep.start() as run:
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model)
    loader = run.loader(torch.utils.data.TensorDataset(torch.ones(64, 2)), global_batch=4)
    for step in run.steps(loader, until=100):
        with step as batch:
            (x,) = batch.data
            batch.scale(model(x).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
"""
MOVES = 1 + SCRIPT.splitlines().index("            optimizer.step()")
JOB = """
apiVersion: everstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: refused}
spec:
  replicas: 2
  rendezvous: {backend: BACKEND}
  recovery: {maxRestarts: 5}
  checkpoint: {url: "file:///commits"}
  template: {spec: {containers: [{name: worker, image: x, command: [LAUNCHER, train.py]}]}}
"""


@pytest.mark.parametrize(
    ("backend", "launcher"),
    [("everstep", "everstep-run"), pytest.param("c10d", "torchrun", marks=pytest.mark.long)],
)
def test_script_that_is_refused_in_its_first_step_fails_its_job_after_one_start_of_each_worker(
    backend: str, launcher: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(JOB.replace("BACKEND", backend).replace("LAUNCHER", launcher))
    out = tmp_path / "out"
    done = subprocess.run(
        [
            sys.executable, "-m", "everstep.cli.main", "run", "job.yaml", "--plain", "--out", str(out),
            "--checkpoint", str(tmp_path / "commits"),
        ],
        capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-2000:]
    status = json.loads((out / "status.json").read_text())["raw_status"]
    said = status["failure"]["message"]
    assert said.startswith("ScriptRefused: worker "), said
    assert "LoopError: " in said
    assert "Write run.track(optimizer=optimizer)" in said
    assert f"train.py:{MOVES}" in said
    assert said.endswith("correct the script and create the job again")
    (failed,) = (c for c in status["conditions"] if c["type"] == "Failed")
    assert (failed["status"], failed["reason"], failed["message"]) == ("True", "ScriptRefused", said)
    assert status["restarts"]["total"] == 0
    assert sorted((tmp_path / "starts").read_text().split()) == ["0", "1"]
    events = [e.reason for e in History.load(out / "history.jsonl") if isinstance(e, EventSeen)]
    assert events.count("ScriptRefused") == 1
    assert "WorkerLost" not in events
