"""examples/context_parallel: logits of texts that no rank has whole, and kills that leave no trace."""

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
NAME = "context_parallel"
STEPS = 24
NOTED = PROGRAMS / "divided.py"


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    """Two replicas of two ranks, which note their logits in the last step."""
    return shared(NAME, (str(STEPS), "2"), 4, [NOTED])


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    arguments = ("--steps", str(STEPS), "--every-steps", "8")
    check_kill(NAME, tmp_path, calm, arguments, (9, 18), 2)


@pytest.mark.long
def test_logits_and_gradients_are_those_of_whole_texts(calm: Ended) -> None:
    logits, gradients = check(calm, 2)
    record(NAME, "largest difference of a logit from the model of whole texts, 2 ranks", logits, "")
    record(
        NAME, "largest difference of a gradient from the model of whole texts, by the largest gradient", gradients, ""
    )
    tokens = torch.load(calm.folder / "logits-0.pt")["given"].shape[1]
    record(NAME, "share of the tokens on a rank of 2", tokens / script(NAME).LENGTH, "", 0.5)


@pytest.mark.long
def test_logits_and_gradients_of_four_ranks_are_those_of_whole_texts(tmp_path: Path) -> None:
    check(undisturbed(NAME, tmp_path, ("8", "4"), 4, [NOTED]), 4)


def check(ended: Ended, ranks: int) -> tuple[float, float]:
    """The largest differences of a logit and of a gradient."""
    for rank in range(WORLD):
        assert read(ended, rank)["given"].shape[1] == script(NAME).LENGTH // ranks, "a rank has its part of each text"
    return furthest(NAME, ended, ranks, by_tokens=True)
