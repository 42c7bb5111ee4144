"""examples/three_d: the parameters of the model in one piece, whole replicas, and kills that leave no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, Ended, RecipeFailed, disturbed, kill, undisturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "three_d"
STEPS = 20


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    """Two replicas of two stages of two ranks."""
    return shared(NAME, ("--steps", str(STEPS)), 8)


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    arguments = ("--steps", str(STEPS), "--every-steps", "10")
    check_kill(NAME, tmp_path, calm, arguments, (6, 14), 4, restarts=4)


@pytest.mark.long
def test_parameters_are_those_of_the_model_in_one_piece(tmp_path: Path, calm: Ended) -> None:
    whole = undisturbed(NAME, tmp_path, ("--steps", str(STEPS)), 1, [PROGRAMS / "whole_model.py"])
    furthest = 0.0
    for stage in range(2):
        parts = [calm.state[f"model@{stage * 2 + part}of4"] for part in range(2)]
        for name, part in parts[0].items():
            block, rest = name.split(".", 1)
            divided = {"up": 0, "down": 1}.get(rest)
            found = part if divided is None else torch.cat([one[name] for one in parts], divided)
            expected = whole.state["model"][f"{stage * 2 + int(block)}.{rest}"]
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
            furthest = max(furthest, float((found - expected).abs().max()))
    record(NAME, "largest difference of a parameter from the model in one piece", furthest, "")


@pytest.mark.long
def test_a_replica_of_one_rank_has_the_model_in_one_piece(tmp_path: Path) -> None:
    whole = undisturbed(NAME, tmp_path / "whole", ("--steps", str(STEPS)), 1, [PROGRAMS / "whole_model.py"])
    arguments = ("--steps", str(STEPS), "--stages", "1", "--parts", "1")
    alone = undisturbed(NAME, tmp_path / "alone", arguments, 2)
    for name, expected in whole.state["model"].items():
        torch.testing.assert_close(alone.state["model"][name], expected, rtol=1e-3, atol=1e-5)


def test_a_part_of_a_replica_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeFailed, match=r"groupSize"):
        disturbed(NAME, tmp_path, ("--steps", "1"), processes=3)


@pytest.mark.long
def test_a_lost_worker_costs_its_replica_alone(tmp_path: Path) -> None:
    """The other replica trains on, with the whole batch."""
    hit = disturbed(NAME, tmp_path, ("--steps", "150"), 4, [kill(NAME, 20, 40, workers=4)], elastic="2:4")
    assert hit.step == 150
    assert "formed with 2 workers" in hit.output
