"""A loop that was ended by an error, in a script that goes on as if nothing were wrong."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import everstep
from everstep.recovery.errors import LoopError


def train_and_catch(folder: str) -> None:
    """Its second step is taken and not entered."""
    weight = torch.zeros(1)
    with everstep.start(folder) as run:
        run.track(weight=weight)
        with contextlib.suppress(RuntimeError):
            for step in run.steps(until=4):
                if step.number == 0:
                    with step:
                        weight += 1


def test_error_of_the_loop_that_the_script_has_caught_is_raised_at_its_end(tmp_path: Path) -> None:
    with pytest.raises(LoopError, match=r"did not come to step 4: .* after step 1 by an error .*was taken and not"):
        train_and_catch(str(tmp_path))


WAIT = """
def wait():
    "Until step 2 is committed: a failing end would break its save off."
    while True:
        try:
            if everstep.load(sys.argv[1]).step >= 2:
                return
        except everstep.checkpoint.NoCommit:
            time.sleep(0.02)
"""
LEFT = f"""
import os, sys, threading, time, torch, everstep
{WAIT}
weight = torch.zeros(1)
run = everstep.start(sys.argv[1], every_steps=2)
run.track(weight=weight)
for step in run.steps(until=9):
    with step:
        weight += 1
    if run.step == 3:
        wait()
        break
END
"""


@pytest.mark.long_but("raise everstep.Preempted(3, True)-86-3")
@pytest.mark.parametrize(
    ("end", "code", "saved"),
    [
        ("", 0, 3),
        ("sys.exit()", 0, 3),
        ("run.close()", 0, 3),
        ("os.fork() or time.sleep(1)", 0, 3),
        ("threading.Thread(target=time.sleep, args=(1,)).start()", 0, 3),
        ("raise ValueError", 1, 2),
        ("raise everstep.Preempted(3, True)", 86, 3),  # so says the script; the run knows of no such thing
    ],
)
def test_scripts_end_closes_the_run_whose_loop_it_has_left(end: str, code: int, saved: int, tmp_path: Path) -> None:
    done = play(tmp_path, LEFT.replace("END", end))
    assert done.returncode == code, done.stderr
    assert everstep.load(str(tmp_path / "run")).state["weight"].item() == saved


FORKED = f"""
import os, sys, time, torch, everstep
{WAIT}
weight = torch.zeros(1)
with everstep.start(sys.argv[1], every_steps=2) as run:
    run.track(weight=weight)
    for step in run.steps(until=9):
        with step:
            weight += 1
        if run.step == 3:
            wait()
            if (child := os.fork()) == 0:
                sys.exit(0)
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), everstep.load(sys.argv[1]).step)
        if run.step == 5 and (child := os.fork()):
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_child_that_the_loop_forks_ends_nothing_of_its_parents_run(tmp_path: Path) -> None:
    """It would save, and speak to the other ranks, by the connections of its parent."""
    done = play(tmp_path, FORKED)
    assert (done.returncode, done.stdout) == (0, "child 0 2\nchild 1\n"), done.stderr
    assert "step 5 in a process that the script has forked (os.fork)" in done.stderr
    assert everstep.load(str(tmp_path / "run")).state["weight"].item() == 9


AWAY = """
import os, sys, torch, everstep
weight = torch.zeros(1)
with everstep.start(sys.argv[1], every_steps=2) as run:
    run.track(weight=weight)
    for step in run.steps(until=4):
        with step:
            weight += 1
        if run.step == 3:
            os.rename(sys.argv[1], sys.argv[1] + "-away")
"""


def test_run_whose_last_step_cannot_be_saved_ends_with_the_cause_and_goes_on_later(tmp_path: Path) -> None:
    done = play(tmp_path, AWAY)
    assert done.returncode == 1, done.stderr
    said = done.stderr.rstrip().rpartition("\n")[2]
    assert "the last step, 4, could not be committed: file:///" in said
    assert "Bring it back" in said
    (tmp_path / "run-away").rename(tmp_path / "run")
    done = play(tmp_path, AWAY.replace("run.step == 3", "False"))
    assert done.returncode == 0, done.stderr
    assert everstep.load(str(tmp_path / "run")).state["weight"].item() == 4


MODEL = """
import sys, time, torch, everstep
{WAIT}
run = everstep.start(sys.argv[1], every_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(until=9):
    with step:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if run.step == 3:
        wait()
        break
left = {name: p.clone() for name, p in model.state_dict().items()}
BEFORE
{END}
torch.save(left, sys.argv[1] + ".left")
"""


SPARSE = "model.register_buffer('graph', torch.eye(2).to_sparse(), persistent=False)\n"  # torch cannot reshape it


WEIGHTS = ("model.load_state_dict({n: v * 0 for n, v in left.items()})", "model")
RATE = ("optimizer.param_groups[0]['lr'] = 0.0", "optimizer")


@pytest.mark.long_but("weights-dense")
@pytest.mark.parametrize(
    ("end", "named", "graph"),
    [
        pytest.param(*WEIGHTS, "", id="weights-dense"),
        pytest.param(*WEIGHTS, SPARSE, id="weights-sparse"),
        pytest.param(*RATE, "", id="rate-dense"),
        pytest.param(*RATE, SPARSE, id="rate-sparse"),
    ],
)
def test_what_changes_behind_a_loop_that_was_left_is_saved_as_no_step(
    end: str, named: str, graph: str, tmp_path: Path
) -> None:
    script = MODEL.replace("{WAIT}", WAIT).replace("{END}", end).replace("optimizer =", f"{graph}optimizer =")
    done = play(tmp_path, script.replace("BEFORE", ""))
    assert done.returncode == 1
    assert f"LoopError: {named} changed after the loop was left behind step 3" in done.stderr
    assert "Write `run.close()` right behind the loop" in done.stderr
    assert everstep.load(str(tmp_path / "run")).step == 2
    done = play(tmp_path, script.replace("BEFORE", "run.close()"))
    assert done.returncode == 0, done.stderr
    assert everstep.load(str(tmp_path / "run")).step == 3


@pytest.mark.long
def test_evaluation_behind_a_loop_that_was_left_neither_changes_the_commit_nor_is_changed(tmp_path: Path) -> None:
    end = "model.eval(); model[0].weight.requires_grad_(False); run.close(); assert not model.training"
    done = play(tmp_path, MODEL.replace("{WAIT}", WAIT).replace("{END}", end).replace("BEFORE", ""))
    assert done.returncode == 0, done.stderr
    commit = everstep.load(str(tmp_path / "run"))
    assert commit.step == 3
    left = torch.load(tmp_path / "run.left")
    assert all(torch.equal(commit.state["model"][name], value) for name, value in left.items())
    assert json.loads(commit.state["switches"]["switched"]) == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("loop", "said"),
    [
        ("with step: sys.exit()", "LoopError: the program was ended inside step 0"),
        ("if step.number: break", "LoopError: the run did not come to step 9: its loop was ended after step 0"),
    ],
)
def test_run_that_the_scripts_end_cannot_close_is_no_success(loop: str, said: str, tmp_path: Path) -> None:
    body = (
        LEFT.partition("for step")[0] + f"try:\n  for step in run.steps(until=9):\n    {loop}\nexcept Exception: pass\n"
    )
    done = play(tmp_path, body)
    assert done.returncode == 1, done.stderr
    assert said in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("ValueError('a sample')", 1, "did not come to step 9: its loop was ended after step 1 by an error"),
        ("SystemExit(3)", 3, ""),
    ],
)
def test_error_that_has_left_the_block_of_the_run_and_was_caught_is_no_success(
    error: str, code: int, said: str, tmp_path: Path
) -> None:
    caught = f"""
try:
    with run:
        for step in run.steps(until=9):
            with step:
                weight += 1
            raise {error}
except BaseException:
    pass
"""
    done = play(tmp_path, LEFT.partition("for step")[0] + caught)
    assert done.returncode == code, done.stderr
    assert said in done.stderr


def play(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, folder / "train.py", folder / "run"], capture_output=True, text=True, timeout=200, check=False
    )


def test_loop_that_is_left_by_break_is_complete_though_an_error_was_caught_in_it(tmp_path: Path) -> None:
    weight = torch.zeros(1)
    with everstep.start(str(tmp_path)) as run:
        run.track(weight=weight)
        for step in run.steps(until=4):
            with step, contextlib.suppress(ValueError):
                weight += 1
                raise ValueError("a sample is damaged")
            if run.step == 2:
                break
    assert weight.item() == 2


TAKEN_BY_HAND = """
import sys, torch, everstep
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
with everstep.start(sys.argv[1], every_steps=4) as run:
    run.track(model=model, optimizer=optimizer)
    steps = run.steps(until=4)
    while run.step < 4:
        with next(steps):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        END
"""


@pytest.mark.long_but("-0")
@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise ValueError('a plot')", 1)])
def test_steps_that_are_never_asked_for_their_end_are_dropped_with_pythons(end: str, code: int, tmp_path: Path) -> None:
    """The interpreter drops what the script's variables hold when it has taken apart half of torch."""
    done = play(tmp_path, TAKEN_BY_HAND.replace("END", end))
    assert done.returncode == code, done.stderr
    assert ("Traceback" in done.stderr, "Exception ignored" in done.stderr) == (code == 1, False), done.stderr
