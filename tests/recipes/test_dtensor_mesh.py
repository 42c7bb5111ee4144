"""examples/dtensor_mesh: another layout has the same results, and kills leave no trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.recipes.kills import check_kill
from support.recipes.recipes import Ended, undisturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "dtensor_mesh"
ARGUMENTS = ("--steps", "24", "--every-steps", "8")


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    return shared(NAME, ARGUMENTS, 4)


@pytest.mark.turns(3)
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    check_kill(NAME, tmp_path, calm, ARGUMENTS, (9, 18), 2)


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("pixels", 2), *(pytest.param(*one, marks=pytest.mark.long) for one in [("classes", 2), ("none", 1)])],
)
def test_another_layout_has_the_same_results(tmp_path: Path, calm: Ended, layout: str, ranks: int) -> None:
    """Sums are made in another order, so the last bits may differ."""
    other = undisturbed(NAME, tmp_path, (*ARGUMENTS, "--layout", layout, "--ranks", str(ranks)), ranks)
    furthest = 0.0
    for name, expected in calm.state["model"].items():
        furthest = max(furthest, float((other.state["model"][name] - expected).abs().max()))
    if layout == "pixels":
        record(NAME, "largest difference of a parameter between two layouts", furthest, "")
    assert furthest < 1e-5, layout
