"""examples/dtensor_mesh: another layout has the same results and restores the same bits; kills leave no trace."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, Ended, differences, undisturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "dtensor_mesh"
ARGUMENTS = ("--steps", "24", "--every-steps", "8")


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    return shared(NAME, ARGUMENTS, 4)


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    check_kill(NAME, tmp_path, calm, ARGUMENTS, (9, 18), 2)


@pytest.mark.long_but("pixels-2")
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("pixels", 2), ("classes", 2), ("none", 1)],
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


@pytest.mark.long
def test_a_commit_of_one_layout_is_restored_in_another(tmp_path: Path, calm: Ended) -> None:
    """Bit by bit: two replicas with divided hidden units made it, and one replica with divided pixels goes on."""
    shutil.copytree(calm.folder / "commits", tmp_path / "commits")
    arguments = ("--steps", "25", "--layout", "pixels")
    more = undisturbed(NAME, tmp_path, arguments, 2, [PROGRAMS / "restored.py"])
    assert (calm.step, more.step) == (24, 25)
    model, optimizer = calm.state["model"], calm.state["optimizer"]["state"]
    expected = {"parameters": list(model.values()), "optimizer": list(optimizer.values())}
    changed = []
    for rank in range(2):
        restored = torch.load(tmp_path / f"restored-{rank}.pt")
        assert len(restored["parameters"]) == len(restored["optimizer"]) == 4
        assert all(state["step"] == 24 for state in restored["optimizer"])
        changed += differences(replace(calm, state=expected), replace(calm, state=restored))
    record(NAME, "values that differ after a restore in another layout", len(changed), "")
    assert changed == []
