"""Failures between `everstep.start` and the first step: the others keep their processes, and no round is formed that
could tell one failure from the next. Each is charged nevertheless.

Real processes; jobs of several agents over a real etcd.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.agent.agent_job import Job
from support.processes import warm_agent
from support.processes.warm_python import warm

pytestmark = pytest.mark.timeout(240)
LIMIT = 200
MOST = 6  # processes that a rank may need: its first, those after charged failures, and one that was under way

SCRIPT = """
import os, sys, time
import torch, everstep
how, who, folder = sys.argv[1:4]
run = everstep.start()
rank = int(os.environ["LOCAL_RANK"])
fails = who == "all" or rank == int(who)
with open(f"{folder}/starts-{rank}-{os.getppid()}", "a") as f:
    f.write("x")
# All have said hello: from then on the processes of the job are known to keep their memory.
time.sleep(0.5)

def fail():
    if how.isdecimal():
        sys.exit(int(how))
    if how == "refused":
        run.track(torch.nn.Linear(2, 1))
    raise RuntimeError("a mistake")

if fails and how != "step":
    fail()
with run:
    model = torch.nn.Linear(2, 1)
    if run.world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters())
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(torch.utils.data.TensorDataset(torch.ones(64, 2)), global_batch=12)
    for step in run.steps(loader, until=10**6):
        with step as batch:
            if fails:
                fail()
            (x,) = batch.to(run.device).data
            batch.scale(model(x).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.05)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(*argv: object) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return warm().run(warm_agent.__file__, *argv, timeout=LIMIT, env=environ)


def starts(folder: Path) -> dict[str, int]:
    return {path.name: len(path.read_text()) for path in folder.glob("starts-*")}


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "who", "code"), [("raise", "all", 1), ("raise", "1", 1), ("3", "all", 3), ("step", "all", 1)]
)
def test_an_error_after_the_start_uses_up_the_restarts_of_one_agent(
    script: Path, tmp_path: Path, how: str, who: str, code: int
) -> None:
    done = run("--nproc-per-node=3", "--max-restarts=1", script, how, who, tmp_path)
    assert done.returncode == code, done.stderr
    assert "its one restart is used up (--max-restarts)" in done.stderr
    assert max(starts(tmp_path).values()) <= 3, "a process, its one restart, and one that was under way"


def test_a_script_that_the_session_refuses_is_not_restarted(script: Path, tmp_path: Path) -> None:
    done = run("--nproc-per-node=2", "--max-restarts=5", script, "refused", "all", tmp_path)
    assert done.returncode == 1, done.stderr
    assert "LoopError: track() takes each object with a name" in done.stderr.splitlines()[-1]
    assert "the script is refused, and not restarted" in done.stderr.splitlines()[-1]
    assert max(starts(tmp_path).values()) == 1


@pytest.mark.long
@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("3", 3)])
def test_an_error_after_the_start_uses_up_the_restarts_of_a_job_of_three_agents(
    job: Callable[..., Job], script: Path, tmp_path: Path, how: str, code: int
) -> None:
    run = job(script, how, "all", tmp_path, flags=("--max-restarts=1",))
    run.start(3)
    codes = run.codes()
    assert code in codes
    assert 0 not in codes
    assert max(starts(tmp_path).values()) <= MOST
