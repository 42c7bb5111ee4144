"""examples/sequence_parallel: logits of the model in one piece, shares of the tokens, and kills that leave no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.recipes.divided import WORLD, furthest, read
from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, Ended, script, undisturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "sequence_parallel"
STEPS = 24


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    """Two replicas of two ranks, which note their logits in the last step."""
    return shared(NAME, (str(STEPS), "2"), 4, [PROGRAMS / "divided.py"])


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    arguments = ("--steps", str(STEPS), "--every-steps", "8")
    check_kill(NAME, tmp_path, calm, arguments, (9, 18), 2)


@pytest.mark.long
def test_logits_and_gradients_are_those_of_the_model_in_one_piece(calm: Ended) -> None:
    logits, gradients = check(calm, 2)
    record(NAME, "largest difference of a logit from the model in one piece, 2 ranks", logits, "")
    record(NAME, "largest difference of a gradient from the model in one piece, by the largest gradient", gradients, "")
    tokens = torch.load(calm.folder / "logits-0.pt")["tokens"]
    record(NAME, "share of the tokens between the layers on a rank of 2", tokens / script(NAME).LENGTH, "", 0.5)


@pytest.mark.long
def test_logits_and_gradients_of_four_ranks_are_those_of_the_model_in_one_piece(tmp_path: Path) -> None:
    check(undisturbed(NAME, tmp_path, ("8", "4"), 4, [PROGRAMS / "divided.py"]), 4)


def check(ended: Ended, ranks: int) -> tuple[float, float]:
    """The largest differences of a logit and of a gradient."""
    for rank in range(WORLD):
        assert read(ended, rank)["tokens"] == script(NAME).LENGTH // ranks, (
            "between the layers a rank has its share of the tokens"
        )
    return furthest(NAME, ended, ranks)
