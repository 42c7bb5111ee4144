"""Advice about a carried variable works as it is written: its names are free, and each key is there once.

Whole scripts that follow it are rows of `tests/ordinary` (`…_advised`).
"""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch

from everstep.train.guards.script_text.advice import text_of
from everstep.train.guards.script_text.loop_carried import LoopCarried
from everstep.train.guards.untracked.covered import OWN_NAMES, keyword


def loop_carried(name: str, line: int = 3, *, bound: bool = True) -> LoopCarried:
    return LoopCarried(name, line, "the loss", line + 1, bound=bound)


def keys_of(text: str) -> list[str]:
    """Of the dictionary that is to be written."""
    written = re.search(r"Write \S+ = (\{.*?\})", text)
    assert written is not None, text
    parsed = ast.parse(written[1], mode="eval").body
    assert isinstance(parsed, ast.Dict)
    return [key.value for key in parsed.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


@pytest.mark.parametrize("name", OWN_NAMES)
def test_a_name_of_the_sessions_own_is_not_advised(name: str) -> None:
    text = text_of("train.py", [loop_carried(name, bound=False)], {name: [1]}).whole
    assert f"run.track({name}_2={name})" in text


def test_a_name_that_is_tracked_already_is_not_advised() -> None:
    text = text_of("train.py", [loop_carried("seen", bound=False)], {"seen": [1]}, {"seen", "seen_2"}).whole
    assert "run.track(seen_2_2=seen)" in text


@pytest.mark.parametrize(
    ("name", "taken", "advised"),
    [
        ("ema.model", {"model"}, "ema_model"),
        ("ema.model", {"model", "ema_model"}, "ema_model_2"),
        ("ema.model", (), "model"),
        ("batch.data", (), "batch_data"),
        ("kept['x']", {"x"}, "kept"),
        ("rng", (), "rng_2"),
    ],
)
def test_what_is_refused_is_to_be_tracked_by_a_name_that_is_free(name: str, taken: Any, advised: str) -> None:
    assert keyword(name, taken) == advised


def test_a_variable_that_is_carried_in_two_places_is_written_once() -> None:
    """The hidden state of a language model is: in the epoch's function, and in the evaluation."""
    text = text_of("train.py", [loop_carried("hidden"), loop_carried("hidden", 9)], {"hidden": 0.0}).whole
    assert keys_of(text) == ["hidden"]


def test_a_batch_that_is_fetched_a_step_early_is_to_be_fetched_in_its_step() -> None:
    """nanoGPT's `X, Y`: each rank has others, which would be refused where they are tracked."""
    batch = torch.zeros(2, 3)
    text = text_of("train.py", [loop_carried("X"), loop_carried("Y")], {"X": batch, "Y": batch}).whole
    assert "If X and Y came from this rank's own samples" in text
    assert "fetch it in the step that trains on it" in text
    assert "own samples" not in text_of("train.py", [loop_carried("count")], {"count": 0.5}).whole
