"""What a process that was asked to stop leaves running when Python ends: none of gloo's threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from everstep.recovery.group.in_flight import PeerLost
from everstep.reporting.stop_signal import Preempted
from everstep.train.coordination.step_coordinator import StepCoordinator

# Two ranks, forked from here so that torch is imported once. Each keeps the exception, as Python does until it has left
# the program, and prints how many of gloo's threads live once the process groups are taken down.
SCRIPT = """
import contextlib, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.reporting.stop_signal import Preempted

def gloo_threads():
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            found += (task / "comm").read_text().startswith("pt_gloo")
    return found

def train(rank, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    weights = torch.zeros(3)
    boundary = StepCoordinator.find(f"{folder}/commits", 100, None, {})
    boundary.begin({"weights": weights})
    boundary.watch()
    for step in range(1, 100):
        if step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        boundary.completed(step)

def rank(number, folder):
    try:
        train(number, folder)
    except Preempted as error:
        before = gloo_threads()
        dist.destroy_process_group()
        deadline = time.monotonic() + 5  # a thread that was joined is listed for a moment more
        while gloo_threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        # One write: the other rank's words are not to come in between.
        line = f"rank={number} committed={error.committed} before={before > 0} after={gloo_threads()}\\n"
        os.write(1, line.encode())

children = []
for number in range(2):
    if (pid := os.fork()) == 0:
        rank(number, sys.argv[1])
        sys.exit(0)
    children.append(pid)
print("ends", [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
"""


@pytest.mark.long
def test_rank_that_was_asked_to_stop_holds_no_process_group_when_python_ends(tmp_path: Path) -> None:
    """gloo's threads free the last tensors of a collective. One that does so while Python ends takes the exit code."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("EVERSTEP_", "PET_", "RANK", "WORLD_SIZE"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
        env=clean,
        check=False,
    )
    lines = sorted(done.stdout.splitlines())
    held_nothing = [f"rank={n} committed=True before=True after=0" for n in range(2)]
    assert lines == ["ends [0, 0]", *held_nothing], done.stdout + done.stderr


@pytest.mark.parametrize("lost_after", [0, 1])
def test_rank_whose_peers_leave_once_the_commit_exists_is_stopped_too(
    lost_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last agreement of a world that stops breaks if another rank is out of the door already. Before the commit it
    is a loss like any other."""
    coordinator = StepCoordinator.find(str(tmp_path), 100, None, {})
    coordinator.begin({"weights": torch.zeros(3)})
    coordinator.watch()
    answers = [False] * lost_after

    def agreement(done: bool) -> bool:
        if answers:
            return answers.pop(0)
        raise PeerLost("rank 1 is gone")

    monkeypatch.setattr(coordinator, "_all", agreement)
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        with pytest.raises(Preempted if lost_after else PeerLost) as caught:
            coordinator.completed(1)
    finally:
        coordinator.leave()
        coordinator.close()
    if isinstance(caught.value, Preempted):
        assert caught.value.committed
        assert caught.value.code == 86
