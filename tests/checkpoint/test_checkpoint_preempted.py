"""SIGTERM to one process of a loop of the script's own: all save the same step, and end behind it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import everstep

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), Path(sys.argv[1])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def on_event(kind, **fields):
    if kind == "committed" and "LEAVES" in os.environ:
        os._exit(3)
checkpointer = everstep.Checkpointer(every_seconds=1e6, on_event=on_event)
state = {"model": model, "optimizer": optimizer}
first = checkpointer.restore(state) or 0
(folder / f"first-{rank}").write_text(str(first))
(folder / f"pid-{rank}").write_text(str(os.getpid()))
for step in range(first, first + 5 if first else 10_000):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    (folder / f"step-{rank}").write_text(str(step + 1))
    time.sleep(0.01)
    try:
        if checkpointer.should_save(step + 1):
            checkpointer.save(step + 1, state)
    except everstep.Preempted as e:
        (folder / f"end-{rank}").write_text(json.dumps([e.step, e.committed, e.code]))
        raise
checkpointer.close()
"""


def start(folder: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=0", "script.py", str(folder))
    with (folder / "log").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *flags], cwd=folder, env={**os.environ, **environ},
            stdout=out, stderr=out,
        )  # fmt: skip


def until_step(folder: Path, rank: int, step: int, agent: subprocess.Popen[bytes]) -> None:
    path, deadline = folder / f"step-{rank}", time.monotonic() + 90
    while not path.exists() or int(path.read_text() or 0) < step:
        assert agent.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, f"no step {step}"
        time.sleep(0.02)


@pytest.mark.long_but("torchrun")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("whom", ["rank 1", "torchrun"])
def test_all_ranks_save_the_step_in_which_one_is_asked_to_stop(tmp_path: Path, whom: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {
        "EVERSTEP_CHECKPOINT_URL": str(tmp_path / "commits"), "EVERSTEP_CHECKPOINT_ON_PREEMPTION": "1",
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    agent = start(tmp_path, environ)
    try:
        until_step(tmp_path, 1, 20, agent)
        os.kill(agent.pid if whom == "torchrun" else int((tmp_path / "pid-1").read_text()), signal.SIGTERM)
        agent.wait(60)
        missing = [rank for rank in range(2) if not (tmp_path / f"end-{rank}").exists()]
        assert missing == [], (tmp_path / "log").read_text()
        ends = [json.loads((tmp_path / f"end-{rank}").read_text()) for rank in range(2)]
        assert ends[0] == ends[1], (tmp_path / "log").read_text()
        step, committed, code = ends[0]
        assert (step >= 20, committed, code) == (True, True, 86)
        steps = [int((tmp_path / f"step-{rank}").read_text()) for rank in range(2)]
        assert steps == [step, step], "a step behind the commit would be repeated"

        agent = start(tmp_path, environ)
        assert agent.wait(90) == 0, (tmp_path / "log").read_text()
        assert (tmp_path / "first-0").read_text() == str(step)
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_rank_whose_rank_0_has_gone_behind_the_commit_says_that_it_exists(tmp_path: Path) -> None:
    """Rank 0 leaves as soon as it knows, and a busy machine may drop its last message."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {
        "EVERSTEP_CHECKPOINT_URL": str(tmp_path / "commits"), "EVERSTEP_CHECKPOINT_ON_PREEMPTION": "1",
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "LEAVES": "1",
    }  # fmt: skip
    agent = start(tmp_path, environ)
    try:
        until_step(tmp_path, 1, 20, agent)
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGTERM)
        agent.wait(60)
        assert (tmp_path / "end-1").exists(), (tmp_path / "log").read_text()
        step, committed, code = json.loads((tmp_path / "end-1").read_text())
        assert (committed, code) == (True, 86), (tmp_path / "log").read_text()
        from everstep import load  # noqa: PLC0415

        assert load(str(tmp_path / "commits"), only=["model"]).step == step
    finally:
        agent.kill()
        agent.wait()
