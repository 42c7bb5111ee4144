"""examples/layerwise: logits of the model in one piece, and kills that leave no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, Ended, script, undisturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "layerwise"
STEPS = 24
NOTED = PROGRAMS / "layer_outputs.py"


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    """Two replicas of two ranks, which note what their last step computed."""
    return shared(NAME, ("--steps", str(STEPS)), 4, [NOTED])


@pytest.mark.turns(3)
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    arguments = ("--steps", str(STEPS), "--every-steps", "8")
    check_kill(NAME, tmp_path, calm, arguments, (9, 18), 2)


def test_logits_are_those_of_the_model_in_one_piece(calm: Ended) -> None:
    furthest = check(calm, ranks=2)
    record(NAME, "largest difference of a logit from the model in one piece, 2 ranks", furthest, "")


@pytest.mark.long
def test_logits_of_four_ranks_are_those_of_the_model_in_one_piece(tmp_path: Path) -> None:
    check(undisturbed(NAME, tmp_path, ("--steps", "8", "--ranks", "4"), 4, [NOTED]), ranks=4)


def check(ended: Ended, ranks: int) -> float:
    """The largest difference of a logit, of all replicas."""
    furthest = 0.0
    train = script(NAME)
    each = train.PARTS // ranks
    for first in range(0, 4, ranks):
        places = [torch.load(ended.folder / f"part-{rank}.pt") for rank in range(first, first + ranks)]
        whole = torch.nn.Sequential()
        for place, found in enumerate(places):
            layers = torch.nn.Sequential(*(train.part(place * each + i) for i in range(each)))
            layers.load_state_dict(found["parameters"])
            whole.append(layers)
        with torch.no_grad():
            logits = whole(places[0]["given"])
        torch.testing.assert_close(places[-1]["output"], logits, rtol=1e-5, atol=1e-6)
        furthest = max(furthest, float((places[-1]["output"] - logits).abs().max()))
    return furthest
