"""A loop that was ended by an error, in a script that goes on as if nothing were wrong."""

from __future__ import annotations

import contextlib
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


LEFT = """
import sys, torch, everstep
weight = torch.zeros(1)
run = everstep.start(sys.argv[1], every_steps=2)
run.track(weight=weight)
for step in run.steps(until=9):
    with step:
        weight += 1
    if run.step == 3:
        break
END
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit()", 0), ("run.close()", 0), ("raise ValueError", 1)])
def test_script_that_leaves_its_loop_and_closes_no_run_is_told(end: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEFT.replace("END", end))
    done = subprocess.run(
        [sys.executable, tmp_path / "train.py", tmp_path / "run"], capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    told = "left its loop after step 3 of 9 and ends without run.close()" in done.stderr
    assert told is (end in ("", "sys.exit()")), done.stderr
    assert everstep.load(str(tmp_path / "run")).state["weight"].item() == (3 if end == "run.close()" else 2)


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
