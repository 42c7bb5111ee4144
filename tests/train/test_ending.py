"""A loop that was ended by an error, in a script that goes on as if nothing were wrong."""

from __future__ import annotations

import contextlib
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
