"""`everstep rerun` of a local run: another process, over the same commits, by what the first was started with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.client import InvalidRequest, TrainingClient
from support.scenarios.player import wait_for

pytestmark = pytest.mark.timeout(300)
SECONDS = 120.0

SCRIPT = """
import os
import sys
import time

import torch

import everstep

with everstep.start(every_steps=10) as run:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(torch.utils.data.TensorDataset(torch.ones(400, 2)), global_batch=4)
    for step in run.steps(loader, until=40):
        with step as batch:
            (x,) = batch.data
            batch.scale(model(x).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        print("step", run.step, sys.argv[1], flush=True)
        time.sleep(0.1)
        if run.step == 25 and not os.path.exists("mended"):
            raise OSError("the disk is full")
"""
JOB = {
    "apiVersion": "everstep.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "mend"},
    "spec": {
        "replicas": 2,
        "recovery": {"maxRestarts": 0},
        "checkpoint": {"url": ""},
        "template": {
            "spec": {"containers": [{"name": "worker", "image": "x", "command": ["everstep-run", "train.py", "word"]}]}
        },
    },
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the commands run, with the job's files in a folder beside it."""
    with tempfile.TemporaryDirectory() as sockets:  # a socket's path has a limit
        monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
        monkeypatch.setenv("KUBECONFIG", f"{sockets}/none")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "job").mkdir()
        (tmp_path / "job/train.py").write_text(SCRIPT)
        (tmp_path / "job/job.yaml").write_text(json.dumps(JOB))
        yield tmp_path
        client = TrainingClient(local=True)
        for job in client.list_jobs():
            if not job.ended and job.place.startswith("local run"):
                client.delete_job(job.name)
        wait_for("no run is left", lambda: not any(job.place.startswith("local") for job in client.list_jobs()), 60)


def everstep(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "everstep.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=dict(os.environ))


def steps(client: TrainingClient) -> list[str]:
    return [line.split()[1] for line in client.get_job_logs("mend") if line.startswith("step")]


def ended(client: TrainingClient) -> None:
    client.wait_for_job_status("mend", timeout=SECONDS)
    wait_for("the run's end", lambda: client.get_job("mend").place.startswith("ended, in "), 60)


@pytest.mark.long
def test_failed_run_that_is_mended_goes_on_from_its_commit_by_the_same_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = everstep("run", "job/job.yaml", "--plain", "--workers", "1")
    assert first.returncode == 1, first.stdout + first.stderr
    shown = [line for line in first.stdout.splitlines() if "CheckpointCommitted" in line]
    assert len(shown) == 1, f"the same words at each commit: {shown}"
    client = TrainingClient(local=True)
    (before,) = client.list_jobs()
    assert (before.status, steps(client)[-1]) == ("Failed", "25")
    newest = client.checkpoints("mend")[0].step  # a script that ends by an error does not wait for its last save
    assert newest in (10, 20)
    refused = everstep("rerun")
    assert refused.returncode == 2
    (folder / "job/mended").touch()
    again = everstep("rerun", "mend")
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("mend: runs again (")
    ended(client)
    assert steps(client) == [str(step) for step in range(newest + 1, 41)]
    assert len(client.get_job("mend").workers) == 1, "--workers is that of the first run"
    assert sorted(job.status for job in client.list_jobs()) == ["Complete", "Failed"], "the earlier run is kept"
    nothing_to_do = everstep("rerun", "mend")
    assert nothing_to_do.returncode == 2
    assert "its newest commit at file://" in nothing_to_do.stderr
    assert "(step 40) leaves nothing to train" in nothing_to_do.stderr
    with pytest.raises(InvalidRequest, match="leaves nothing to train"):
        client.rerun("mend")
    monkeypatch.chdir(folder / "job")  # a folder that is given here lies here, whatever the run was started in
    client = TrainingClient(local=folder / ".everstep")
    client.rerun("mend", checkpoint="other", timeout=SECONDS)
    ended(client)
    assert steps(client)[0] == "1", "from the start"
    assert (folder / "job/other").is_dir()
    assert len(client.list_jobs()) == 3


@pytest.mark.long
def test_run_that_is_alive_or_says_not_how_it_was_started_is_refused(folder: Path) -> None:
    (folder / "job/mended").touch()
    script = SCRIPT.replace('print("step"', 'import time; time.sleep(0.2); print("step"')
    (folder / "job/train.py").write_text(script)
    client = TrainingClient(local=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "everstep.cli.main", "run", "job/job.yaml", "--plain"], stdout=subprocess.DEVNULL
    )
    try:
        wait_for("the run", lambda: any(job.status == "Running" for job in client.list_jobs()), SECONDS)
        refused = everstep("rerun", "mend")
        assert refused.returncode == 2
        assert "everstep suspend mend, then everstep resume mend" in refused.stderr
    finally:
        process.terminate()
        process.wait(60)
    (left,) = (folder / ".everstep").iterdir()
    (left / "started.json").unlink()
    refused = everstep("rerun", "mend")
    assert refused.returncode == 2
    assert "use `everstep run` with --checkpoint" in refused.stderr
