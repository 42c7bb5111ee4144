"""examples/context_parallel: logits of texts that no rank has whole, and kills that leave no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, Ended, script, undisturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "context_parallel"
STEPS = 24
NOTED = PROGRAMS / "divided_logits.py"


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    """Two replicas of two ranks, which note their logits in the last step."""
    return shared(NAME, (str(STEPS), "2"), 4, [NOTED])


@pytest.mark.turns(3)
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    arguments = ("--steps", str(STEPS), "--every-steps", "8")
    check_kill(NAME, tmp_path, calm, arguments, (9, 18), 2)


def test_logits_are_those_of_whole_texts(calm: Ended) -> None:
    furthest = check(calm, ranks=2)
    record(NAME, "largest difference of a logit from the model of whole texts, 2 ranks", furthest, "")
    tokens = torch.load(calm.folder / "logits-0.pt")["given"].shape[1]
    record(NAME, "share of the tokens on a rank of 2", tokens / script(NAME).LENGTH, "", 0.5)


@pytest.mark.long
def test_logits_of_four_ranks_are_those_of_whole_texts(tmp_path: Path) -> None:
    check(undisturbed(NAME, tmp_path, ("8", "4"), 4, [NOTED]), ranks=4)


def check(ended: Ended, ranks: int) -> float:
    """The largest difference of a logit, of all replicas."""
    furthest = 0.0
    train = script(NAME)
    model = train.Network()
    for first in range(0, 4, ranks):
        parts = [torch.load(ended.folder / f"logits-{rank}.pt") for rank in range(first, first + ranks)]
        assert [part["given"].shape[1] for part in parts] == [train.LENGTH // ranks] * ranks
        model.load_state_dict(parts[0]["parameters"])
        with torch.no_grad():
            whole = model(torch.cat([part["given"] for part in parts], 1))
        found = torch.cat([part["logits"] for part in parts], 1)
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)
        furthest = max(furthest, float((found - whole).abs().max()))
    return furthest
