"""examples/layerwise: logits of the model in one piece, and kills that leave no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from support.recipes.divided import WORLD, check_gradients
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


def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    arguments = ("--steps", str(STEPS), "--every-steps", "8")
    check_kill(NAME, tmp_path, calm, arguments, (9, 18), 2)


def test_logits_and_gradients_are_those_of_the_model_in_one_piece(calm: Ended) -> None:
    logits, gradients = check(calm, ranks=2)
    record(NAME, "largest difference of a logit from the model in one piece, 2 ranks", logits, "")
    record(NAME, "largest difference of a gradient from the model in one piece, by the largest gradient", gradients, "")


@pytest.mark.long
def test_logits_and_gradients_of_four_ranks_are_those_of_the_model_in_one_piece(tmp_path: Path) -> None:
    check(undisturbed(NAME, tmp_path, ("--steps", "8", "--ranks", "4"), 4, [NOTED]), ranks=4)


def check(ended: Ended, ranks: int) -> tuple[float, float]:
    """The largest difference of a logit, and of a gradient by the largest gradient, on any rank."""
    train = script(NAME)
    each = train.PARTS // ranks
    parts = [torch.load(ended.folder / f"part-{rank}.pt") for rank in range(WORLD)]
    whole = torch.nn.ModuleList(
        torch.nn.Sequential(*(train.part(p * each + i) for i in range(each))) for p in range(ranks)
    )
    for layers, found in zip(whole, parts, strict=False):
        layers.load_state_dict(found["parameters"])
    logits = 0.0
    for first in range(0, WORLD, ranks):
        last = first + ranks - 1
        output = torch.nn.Sequential(*whole)(parts[first]["given"])
        torch.testing.assert_close(parts[last]["output"], output.detach(), rtol=1e-5, atol=1e-6)
        logits = max(logits, float((parts[last]["output"] - output.detach()).abs().max()))
        (cross_entropy(output, torch.load(ended.folder / f"target-{last}.pt")) * ranks / WORLD).backward()
    apart = 0.0
    for rank in range(WORLD):
        expected = {name: p.grad for name, p in whole[rank % ranks].named_parameters()}
        apart = max(apart, check_gradients(expected, [torch.load(ended.folder / f"gradients-{rank}.pt")]))
    return logits, apart
