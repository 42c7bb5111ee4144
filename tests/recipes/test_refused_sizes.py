"""Recipes refuse what their options cannot mean, and say what they can: ranks that do not divide a model, numbers of
local steps or micro-batches that do not divide a batch, and numbers without which training would wait for ever."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.recipes.recipes import EXAMPLES, script

DIVIDED = {  # the option that says how many ranks divide what the script fixes
    "context_parallel": "--ranks",
    "layerwise": "--ranks",
    "moe": "--ranks",
    "pipeline": "--stages",
    "sequence_parallel": "--ranks",
    "tensor_parallel": "--ranks",
    "three_d": "--parts",
}
# examples/dtensor_mesh and examples/zero divide by any number: DTensors may have parts of several sizes.


WRONG = {  # what is said of options
    "amp/train.py --scale 0": "--scale: a loss can be scaled by what is above 0",
    "async_ps/train.py --bound -1": "--bound: with less than 0 no worker may begin",
    "comm_hooks/train.py --average-every 0": "--average-every: the rests are averaged in each step, with 1",
    "ddp/train.py --static-graph --leave-out 0.5": "--leave-out; give 0 or 1 to that",
    "easgd/train.py --period 10": "argument --period: invalid choice: 10 (choose from 1, 2, 3, 4, 6, 8, 12,",
    "heterogeneous/backup.py --piece 0": "--piece: a piece has 1 sample or more",
    "heterogeneous/train.py --adapt 0": "--adapt: shares change after 1 step or more",
    "large_batch/train.py --batch 0": "--batch: a worker needs 1 sample or more",
    "large_batch/train.py --warm-up 0": "--warm-up: the rate goes to a goal in 1 step or more",
    "pipeline/train.py --micro-batches 5": "argument --micro-batches: invalid choice: 5 (choose from 1, 2, 3, 4, 6,",
    "three_d/train.py --micro-batches 5": "argument --micro-batches: invalid choice: 5 (choose from 1, 2, 3, 4, 6,",
}


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The words with which a script of a recipe refuses its options."""

    def say(command: str) -> str:
        script, *options = command.split()
        monkeypatch.setattr(sys, "argv", [script, *options])
        monkeypatch.syspath_prepend((EXAMPLES / script).parent)  # for what the script imports from its folder
        for other in list(sys.modules):  # of another recipe
            if str(getattr(sys.modules[other], "__file__", "")).startswith(str(EXAMPLES)):
                monkeypatch.delitem(sys.modules, other)
        with pytest.raises(SystemExit):
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().err

    return say


@pytest.mark.parametrize("name", DIVIDED)
def test_ranks_that_do_not_divide_the_model_are_refused(name: str, refused: Callable[[str], str]) -> None:
    option = DIVIDED[name]
    expected = f"argument {option}: invalid choice: 3 (choose from 1, 2, 4"
    assert expected in refused(f"{name}/train.py {option} 3")


@pytest.mark.parametrize("command", WRONG)
def test_options_that_mean_nothing_are_refused_with_what_they_can_be(
    command: str, refused: Callable[[str], str]
) -> None:
    assert WRONG[command] in refused(command)


def test_text_that_is_too_short_to_keep_a_part_of_it_is_refused(tmp_path: Path) -> None:
    """Before training, and not in the first evaluation."""
    (tmp_path / "short.txt").write_text("x = 1\n" * 20)
    train = script("gpt")
    with pytest.raises(SystemExit, match=r"short.txt: 641 characters or more are needed"):
        train.main(argparse.Namespace(text=tmp_path / "short.txt"))
