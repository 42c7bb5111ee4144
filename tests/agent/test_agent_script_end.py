"""A script under `everstep-run` leaves its loop early, and closes no run: its end does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import everstep
from support.agent.started import LIMIT

SCRIPT = """
import os, sys, time, torch, everstep
weight = torch.zeros(1)
run = everstep.start(sys.argv[1], every_steps=100)
run.track(weight=weight)
for step in run.steps(until=9):
    with step:
        weight += 1
        time.sleep(0.02)
    if run.step == 3:
        LEAVE
"""


def play(folder: Path, leave: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(leave if "import" in leave else SCRIPT.replace("LEAVE", leave))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    agent = (sys.executable, "-m", "everstep.agent.main", "--nproc-per-node=2", "--max-restarts=0")
    argv: list[str] = [*agent, str(script), str(folder / "run")]
    return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, check=False, env=environ)


@pytest.mark.long
@pytest.mark.parametrize("leave", ["break", "sys.exit()"])
def test_run_is_complete_where_all_ranks_have_left_it_and_goes_on_from_there(leave: str, tmp_path: Path) -> None:
    done = play(tmp_path, leave)
    assert done.returncode == 0, done.stderr
    assert everstep.load(str(tmp_path / "run")).step == 3
    told = "left behind step 3 of 9: it is saved there, and goes on from there when it is started again"
    assert done.stderr.count(told) == 1
    done = play(tmp_path, leave)
    assert done.returncode == 0, done.stderr
    found = everstep.load(str(tmp_path / "run"))
    assert (found.step, found.state["weight"].item()) == (9, 9)
    done = play(tmp_path, leave)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the run is complete already: its commit has 9 steps, of 9") == 1


@pytest.mark.long
def test_script_that_one_rank_ends_with_success_is_none(tmp_path: Path) -> None:
    done = play(tmp_path, "if run.rank == 1: sys.exit(0)")
    assert done.returncode == 1, done.stderr
    assert "rank 1 left the loop after step 3, and ranks [0] did not within 20 s" in done.stderr


@pytest.mark.long
def test_script_that_one_rank_ends_with_a_code_of_its_own_ends_with_that_at_once(tmp_path: Path) -> None:
    done = play(tmp_path, "if run.rank == 1: sys.exit(3)")
    assert done.returncode == 3, done.stderr
    assert "left the loop" not in done.stderr


@pytest.mark.long
def test_second_run_of_a_process_is_refused_by_what_it_is(tmp_path: Path) -> None:
    done = play(tmp_path, "run.close(); everstep.start(sys.argv[1] + '2')")
    assert done.returncode == 1
    assert "LoopError: everstep.start() came a second time in this process" in done.stderr
    assert "init_process_group" not in done.stderr
    assert everstep.load(str(tmp_path / "run")).step == 3


@pytest.mark.long_but("one")
@pytest.mark.parametrize("who", ["True", "run.rank == 1"], ids=["all", "one"])
def test_process_that_is_ended_in_its_loop_by_exit_code_0_has_failed(who: str, tmp_path: Path) -> None:
    done = play(tmp_path, f"if {who}: os._exit(0)")
    assert done.returncode == 1, done.stderr
    assert "exit code 0, but the process was ended before its run was complete, by os._exit(0)" in done.stderr


@pytest.mark.long
def test_process_that_is_ended_so_behind_its_run_has_not(tmp_path: Path) -> None:
    """As scripts do whose libraries hang when the interpreter ends. A child keeps the connection to the agent open."""
    script = SCRIPT.replace("LEAVE", "pass") + "child = os.fork()\nif not child: time.sleep(30)\nos._exit(0)\n"
    done = play(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert everstep.load(str(tmp_path / "run")).step == 9


LAST_SAVE = """
import os, sys, threading, torch, everstep
from everstep.storage import open_store
from everstep.storage.wrapped import WrappedStore
class Away(WrappedStore):
    def call(self, operation, name, act, tear=None):
        if (AWAY) and threading.current_thread().name.startswith("everstep-"):
            FAILS
        return act()
weight = torch.zeros(1)
checkpointer = everstep.Checkpointer(store=Away(open_store(sys.argv[1])), every_steps=1)
checkpointer.restore({"weight": weight})
for step in range(1, 4):
    weight += 1
    handle = checkpointer.save(step, {"weight": weight})
    checkpointer.wait(None if step < 3 else 0)
END
os._exit(0)
"""


@pytest.mark.long_but("in flight")
@pytest.mark.parametrize(
    ("fails", "end", "became"),
    [
        ("threading.Event().wait()", "", "was in flight"),
        ("raise OSError('gone')", "checkpointer.wait()", "had failed"),
        ("raise OSError('gone')", "try: handle.wait()\nexcept Exception: pass", ""),
        ("act", "checkpointer.wait()", ""),
    ],
    ids=["in flight", "failed", "failure known", "saved"],
)
def test_last_save_that_os_exit_loses_is_a_failure_that_names_it(
    fails: str, end: str, became: str, tmp_path: Path
) -> None:
    script = LAST_SAVE.replace("AWAY", "weight.item() == 3").replace("FAILS", fails).replace("END", end)
    agent = (sys.executable, "-m", "everstep.agent.main", "--nproc-per-node=1", "--max-restarts=0")
    (tmp_path / "train.py").write_text(script)
    argv = [*agent, str(tmp_path / "train.py"), str(tmp_path / "run")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, check=False, env=environ)
    assert done.returncode == bool(became), done.stderr
    text = f"exit code 0, but its save of step 3 to file://{tmp_path}/run {became} when the process was ended"
    assert (text in done.stderr) == bool(became), done.stderr
    assert everstep.load(str(tmp_path / "run")).step == (3 if fails == "act" else 2)


FORKED = """
import os, sys, torch, everstep
import torch.distributed as dist
weight = torch.zeros(1)
with everstep.start(sys.argv[1], every_steps=100) as run:
    run.track(weight=weight)
    for step in run.steps(until=6):
        with step:
            child = os.fork() if step.number == 3 else None  # the child goes on as its parent does
            if child:
                print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            one = torch.ones(1)
            dist.all_reduce(one)
            weight += one / 2
"""


def test_child_that_a_step_forks_is_refused_in_its_first_collective_and_the_run_is_complete(tmp_path: Path) -> None:
    """gloo's threads are its parent's: it would wait for ever, and its parent for it."""
    done = play(tmp_path, FORKED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("child 1") == 2, done.stdout
    assert "allreduce in a process that the script has forked (os.fork): the group is its parent's" in done.stderr
    assert everstep.load(str(tmp_path / "run")).state["weight"].item() == 6


ONE_RANK = """
import sys, torch, torch.distributed as dist, everstep
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
run = everstep.start(sys.argv[1], every_steps=100)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(until=2):
    with step:
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
run.close()
dist.all_reduce(torch.ones(1))
if run.rank == 0:
    print(CALL)
"""


@pytest.mark.parametrize(("call", "what"), [("model(torch.ones(3, 2))", "broadcast"), ("dist.barrier()", "barrier")])
def test_collective_that_one_rank_calls_behind_the_loop_says_what_to_write(
    call: str, what: str, tmp_path: Path
) -> None:
    done = play(tmp_path, ONE_RANK.replace("CALL", call))
    assert done.returncode != 0
    assert f"PeerLost: {what} (train.py:17) is behind the loop, and a rank that it needs is gone" in done.stderr
    assert "`model.module`" in done.stderr


def test_one_rank_may_use_the_bare_module_behind_the_loop(tmp_path: Path) -> None:
    done = play(tmp_path, ONE_RANK.replace("CALL", "'shape', model.module(torch.ones(3, 2)).shape"))
    assert done.returncode == 0, done.stderr
    assert "shape torch.Size([3, 4])" in done.stdout
