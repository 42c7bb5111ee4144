"""Each recipe that divides a model refuses a number of ranks that does not divide it, and says which ones do."""

from __future__ import annotations

import runpy
import sys

import pytest

from support.recipes.recipes import EXAMPLES

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


@pytest.mark.parametrize("name", DIVIDED)
def test_ranks_that_do_not_divide_the_model_are_refused(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, option = EXAMPLES / name / "train.py", DIVIDED[name]
    monkeypatch.setattr(sys, "argv", [str(script), option, "3"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().err
    assert f"argument {option}: invalid choice: 3 (choose from 1, 2, 4" in said
