"""examples/tensor_parallel: the logits of the model in one piece, and kills that leave no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, Ended, script, undisturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "tensor_parallel"
STEPS = 40


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    """Two replicas of two ranks, which note their logits in the last step."""
    return shared(NAME, (str(STEPS), "2"), 4, [PROGRAMS / "divided_logits.py"])


@pytest.mark.turns(3)
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    arguments = ("--steps", str(STEPS), "--every-steps", "20")
    check_kill(NAME, tmp_path, calm, arguments, (10, 30), 4)


def test_logits_are_those_of_the_model_in_one_piece(calm: Ended) -> None:
    furthest = check(calm, ranks=2)
    record(NAME, "largest difference of a logit from the model in one piece, 2 ranks", furthest, "")


@pytest.mark.long
def test_logits_of_four_ranks_are_those_of_the_model_in_one_piece(tmp_path: Path) -> None:
    check(undisturbed(NAME, tmp_path, ("8", "4"), 4, [PROGRAMS / "divided_logits.py"]), ranks=4)


def check(ended: Ended, ranks: int) -> float:
    """The largest difference of a logit, of all ranks."""
    furthest = 0.0
    model = script(NAME).Network()
    for rank in range(4):
        found = torch.load(ended.folder / f"logits-{rank}.pt")
        model.load_state_dict(found["parameters"])
        with torch.no_grad():
            whole = model(found["given"])
        torch.testing.assert_close(found["logits"], whole, rtol=1e-4, atol=1e-5)
        assert found["tokens"] == 8, "each rank computes all tokens"
        furthest = max(furthest, float((found["logits"] - whole).abs().max()))
    return furthest
