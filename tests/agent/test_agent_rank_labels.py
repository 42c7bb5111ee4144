"""The label before each line of a traceback is the rank that the process has, and no other one's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import os, pathlib, sys, time
import torch
from torch.nn.parallel import DistributedDataParallel
import everstep

folder, way = pathlib.Path(sys.argv[1]), sys.argv[2]
new = (folder / "killed").exists()

def wait(name):
    while len(list(folder.glob(name + "-*"))) < 3:
        time.sleep(0.01)

run = everstep.start(None)
if new:
    raise ValueError("a new process fails, and has no rank yet")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(until=3):
    with step:
        model(torch.ones(1, 1)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if way == "killed" and run.step == 1 and run.rank == 2:
            (folder / "killed").touch()
            os.kill(os.getpid(), 9)
    if way == "all":
        import atexit  # each prints before one ends, because the agent ends the others then
        atexit.register(wait, "printed")
        atexit.register((folder / f"printed-{run.rank}").touch)
        raise ValueError(f"rank {run.rank} fails")
"""


def stderr_of(folder: Path, way: str) -> str:
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable, "-m", "everstep.agent.main", "--standalone", "--nproc-per-node=3", "--max-restarts=0",
            str(folder / "train.py"), str(folder), way,
        ],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    return done.stderr


def test_each_rank_of_a_job_labels_its_traceback_with_its_own_rank(tmp_path: Path) -> None:
    printed = stderr_of(tmp_path, "all")
    assert sorted(re.findall(r"^\[rank(\d)\]: ValueError: rank (\d) fails$", printed, re.MULTILINE)) == [
        ("0", "0"), ("1", "1"), ("2", "2"),
    ]  # fmt: skip
    assert len(re.findall(r"^\[rank\d\]: Traceback", printed, re.MULTILINE)) == 3, printed


@pytest.mark.long
def test_process_without_a_rank_has_no_label(tmp_path: Path) -> None:
    printed = stderr_of(tmp_path, "killed")
    assert re.search(r"^ValueError: a new process fails, and has no rank yet$", printed, re.MULTILINE), printed
