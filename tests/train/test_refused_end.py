"""A script that catches what its run was refused with does not end as if its run were complete."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.contract import env, error_file

BEGIN = """
import atexit
atexit.register(print, "registered first")
import everstep, torch
atexit.register(print, "registered second")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps):
    with everstep.start(sys_argv[1], every_steps=1) as run:
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(until=steps):
            with step:
                model(torch.ones(2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
"""
# The commit is of another model.
OTHER = "\ntrain(2)\nmodel = torch.nn.Linear(3, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
CAUGHT = "\ntry:\n    train(4)\nexcept Exception as e:\n    print('caught', type(e).__name__)\n"
EXITS = "\ntry:\n    train(4)\nexcept Exception as e:\n    raise SystemExit(0)\n"
OF_A_THREAD = "\nimport threading\nt = threading.Thread(target=train, args=(4,))\nt.start()\nt.join()\n"
# Outside of any run.
BARE_THREAD = """
import threading
start = everstep.start  # such a script is meant; its module is imported here
def reads():
    try:
        everstep.Checkpointer(sys_argv[1]).restore({"model": model, "optimizer": optimizer})
    except Exception as e:
        raise RuntimeError("the thread has failed") from e
t = threading.Thread(target=reads)
t.start()
t.join()
"""
IN_A_STEP = """
with everstep.start(None) as run:
    run.track(model=model, optimizer=optimizer)
    try:
        for step in run.steps(until=3):
            with step:
                run.scale(model(torch.ones(2)).sum()).backward()
    except RuntimeError as e:
        print('caught', type(e).__name__)
        run = None
"""

TRIES_AGAIN = """
with everstep.start(None) as run:
    run.track(model=model, optimizer=optimizer)
    for attempt in range(100):
        try:
            for step in run.steps(until=3):
                with step:
                    raise ValueError("bad batch")
        except Exception as e:
            print('caught', type(e).__name__, e)
"""


def ends(folder: Path, script: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, object]]]:
    log = folder / "termination-log"
    log.touch()
    text = "import sys\nsys_argv = sys.argv\n" + BEGIN + script
    (folder / "train.py").write_text(text)
    done = subprocess.run(
        [sys.executable, str(folder / "train.py"), str(folder / "run")],
        capture_output=True, text=True, timeout=200, check=False,
        env={"PATH": "/usr/bin:/bin", env.JOB_UID: "u", env.TERMINATION_LOG: str(log),
             error_file.PATH: str(folder / "error.json")},
    )  # fmt: skip
    return done, [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("script", [OTHER + CAUGHT, OTHER + EXITS, OTHER + OF_A_THREAD, IN_A_STEP])
def test_process_whose_script_has_caught_the_refusal_fails_with_its_sentence(script: str, tmp_path: Path) -> None:
    done, (record, *_) = ends(tmp_path, script)
    assert done.returncode == 1, done.stderr
    assert "refused_after" in record
    (said,) = (line for line in done.stderr.splitlines() if "everstep: refused: " in line)
    assert str(record["error"]).partition(": ")[2][:40] in said


def test_loop_that_catches_its_error_and_asks_again_ends_with_that_error_named(tmp_path: Path) -> None:
    done, (record, *_) = ends(tmp_path, TRIES_AGAIN)
    assert done.returncode == 1, done.stderr
    caught = [line for line in done.stdout.splitlines() if line.startswith("caught")]
    assert [line.split()[1] for line in caught] == ["ValueError", "LoopError", "LoopError"]
    assert "ended in step 0 by an error that the script has caught: ValueError: bad batch" in str(record["error"])
    assert "Take the `try` around the loop away" in done.stderr
    written = json.loads((tmp_path / "error.json").read_text())  # what the agent says of the process
    assert "caught: ValueError: bad batch" in written["message"]["message"]


@pytest.mark.long
def test_refusal_that_ends_a_thread_outside_of_any_run_fails_the_process(tmp_path: Path) -> None:
    """The interpreter prints it and goes on: the process ended with 0."""
    ends(tmp_path, "\ntrain(2)\n")
    done, (record, *_) = ends(tmp_path, OTHER.replace("\ntrain(2)\n", "") + BARE_THREAD)
    assert done.returncode == 1, done.stderr
    assert record["refused_after"] == 0
    assert done.stderr.count("everstep: refused: StateMismatch: ") == 1, done.stderr
    assert "Exception in thread" in done.stderr


@pytest.mark.long
def test_refusal_of_a_thread_beside_a_run_that_is_complete_fails_nothing(tmp_path: Path) -> None:
    done, records = ends(tmp_path, OTHER + BARE_THREAD)
    assert (done.returncode, records) == (0, []), done.stderr
    assert "the thread has failed" in done.stderr


def test_functions_of_atexit_run_once_each_where_the_exit_code_is_set_at_the_end(tmp_path: Path) -> None:
    done, _ = ends(tmp_path, OTHER + CAUGHT)
    assert done.stdout.splitlines() == ["caught StateMismatch", "registered second", "registered first"]


@pytest.mark.long
def test_run_that_is_complete_afterwards_takes_the_refusal_back(tmp_path: Path) -> None:
    again = "\nsys_argv = [0, sys.argv[1] + '-2']\nmodel = torch.nn.Linear(2, 2)\n"
    again += "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\ntrain(2)\n"
    done, records = ends(tmp_path, OTHER + CAUGHT + again)
    assert (done.returncode, records) == (0, []), done.stderr
