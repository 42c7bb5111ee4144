"""A script that the session refuses, in local mode: the job fails at once, in the session's words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.jobs.history import EventSeen, History

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
# Each rank has shuffled its data for itself.
APART = """
import os
import torch
from torch.nn.parallel import DistributedDataParallel
import everstep

with open("starts", "a") as file:
    file.write(os.environ["EVERSTEP_WORKER_INDEX"] + "\\n")

def train():
    with everstep.start() as run:
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        mine = torch.Generator().manual_seed(int(os.environ["EVERSTEP_WORKER_INDEX"]))
        order = torch.randperm(128, generator=mine)
        data = torch.utils.data.TensorDataset(torch.arange(128.0)[order].reshape(64, 2))
        loader = run.loader(data, global_batch=4)
        for step in run.steps(loader, until=100):
            with step as batch:
                (x,) = batch.data
                batch.scale(model(x).mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
"""
# The commits are of another model: `ANOTHER` has made them.
MISMATCH = APART.replace("randperm(128, generator=mine)", "arange(128)")
ANOTHER = """
import sys, torch, everstep
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with everstep.start(sys.argv[1], every_steps=1) as run:
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=2):
        with step:
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
CALLS = {
    "raised": "train()",
    "raised from": """
try:
    train()
except Exception as e:
    raise RuntimeError("training failed") from e
""",
    "caught": """
try:
    train()
except Exception as e:
    print("went wrong", type(e).__name__)
""",
}
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


def run_job(folder: Path, script: str, backend: str = "everstep", launcher: str = "everstep-run") -> Path:
    """The folder of the run's output; it has failed, because its script is refused."""
    (folder / "train.py").write_text(script)
    (folder / "job.yaml").write_text(JOB.replace("BACKEND", backend).replace("LAUNCHER", launcher))
    out = folder / "out"
    done = subprocess.run(
        [
            sys.executable, "-m", "everstep.cli.main", "run", "job.yaml", "--plain", "--out", str(out),
            "--checkpoint", str(folder / "commits"),
        ],
        capture_output=True, text=True, timeout=200, check=False, cwd=folder,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-2000:]
    return out


def refused_once(folder: Path, out: Path) -> str:
    """What the status says of it; each worker was started once, and nothing was charged."""
    status = json.loads((out / "status.json").read_text())["raw_status"]
    said = status["failure"]["message"]
    assert said.startswith("ScriptRefused: worker "), said
    assert said.endswith("correct the script and create the job again")
    (failed,) = (c for c in status["conditions"] if c["type"] == "Failed")
    assert (failed["status"], failed["reason"], failed["message"]) == ("True", "ScriptRefused", said)
    assert status["restarts"]["total"] == 0
    assert sorted((folder / "starts").read_text().split()) == ["0", "1"]
    events = [e.reason for e in History.load(out / "history.jsonl") if isinstance(e, EventSeen)]
    assert events.count("ScriptRefused") == 1
    assert "WorkerLost" not in events
    return str(said)


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "launcher"),
    [("everstep", "everstep-run"), ("c10d", "torchrun")],
)
def test_script_that_is_refused_in_its_first_step_fails_its_job_after_one_start_of_each_worker(
    backend: str, launcher: str, tmp_path: Path
) -> None:
    said = refused_once(tmp_path, run_job(tmp_path, SCRIPT, backend, launcher))
    assert "LoopError: " in said
    assert "Write run.track(optimizer=optimizer)" in said
    assert f"train.py:{MOVES}" in said


@pytest.mark.long
@pytest.mark.parametrize("call", CALLS)
def test_ranks_of_different_data_are_refused_once_however_the_script_lets_it_out(call: str, tmp_path: Path) -> None:
    out = run_job(tmp_path, APART + CALLS[call])
    assert "rank 1 reads another sample than rank 0 under index 0" in refused_once(tmp_path, out)
    printed_once(out, "rank 1 reads another sample than rank 0 under index 0")


@pytest.mark.long
@pytest.mark.parametrize("call", CALLS)
def test_commit_of_another_model_is_refused_once_however_the_script_lets_it_out(call: str, tmp_path: Path) -> None:
    (tmp_path / "another.py").write_text(ANOTHER)
    subprocess.run([sys.executable, "another.py", str(tmp_path / "commits")], check=True, timeout=120, cwd=tmp_path)
    out = run_job(tmp_path, MISMATCH + CALLS[call])
    assert "StateMismatch: " in refused_once(tmp_path, out)
    printed_once(out, "StateMismatch: ")


def printed_once(out: Path, sentence: str) -> None:
    """The log of a worker that was refused has the sentence once, and no traceback; each worker is a node here."""
    logs = [file.read_text(errors="replace") for file in out.rglob("*.log")]
    refused = [[line for line in log.splitlines() if "everstep: refused: " in line] for log in logs]
    assert any(refused), logs
    for log, lines in zip(logs, refused, strict=True):
        assert len(lines) <= 1, log
        assert all(sentence in line for line in lines), log
        assert "Traceback (most recent" not in log, log
