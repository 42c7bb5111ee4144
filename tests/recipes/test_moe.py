"""examples/moe: tokens are conserved, experts go to other numbers of ranks, and kills leave no trace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, undisturbed
from support.recipes.recorded import record

pytestmark = pytest.mark.timeout(300)
NAME = "moe"
ARGUMENTS = ("--steps", "60", "--every-steps", "20")


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path) -> None:
    calm = undisturbed(NAME, tmp_path / "calm", ARGUMENTS, processes=4)
    check_kill(NAME, tmp_path / "hit", calm, ARGUMENTS, (15, 40), 4)


def test_tokens_are_conserved(tmp_path: Path) -> None:
    """What a rank gives arrives, and comes back; without room at an expert less is given than there is."""
    script = PROGRAMS / "moe_tokens.py"
    ended = undisturbed(NAME, tmp_path, ("12",), 2, [script])
    ranks = [[int(n) for n in line.split()] for line in re.findall(r"tokens ([\d ]+)", ended.output)]
    assert len(ranks) == 2, ended.output
    held, given, arrived, worked, returned = (sum(column) for column in zip(*ranks, strict=True))
    record(NAME, "tokens given to experts in 12 steps", given, f"of {held:,}")
    record(NAME, "tokens that arrived", arrived, "", expected=given)
    record(NAME, "tokens that came back", returned, "", expected=given)
    assert held == 12 * 96 * 8  # each token of each batch belongs to one rank
    assert held / 2 < given < held, "a router that has just begun gives some experts too many"
    assert given == arrived == worked == returned
    assert [r[1] for r in ranks] == [r[4] for r in ranks], "each rank gets back what it gave"


@pytest.mark.long
def test_experts_go_from_two_ranks_to_four(tmp_path: Path) -> None:
    """With room for every token, and no loss by replica, the division changes nothing but the order of sums."""
    room = ("--capacity", "8", "--balance", "0")
    undisturbed(NAME, tmp_path / "changed", ("--steps", "10", "--ranks", "2", *room), 4)
    changed = undisturbed(NAME, tmp_path / "changed", ("--steps", "20", "--ranks", "4", *room), 4)
    always = undisturbed(NAME, tmp_path / "always", ("--steps", "20", "--ranks", "4", *room), 4)
    assert changed.step == always.step == 20
    model = always.state["model"]
    furthest = max(float((changed.state["model"][name] - value).abs().max()) for name, value in model.items())
    record(NAME, "largest difference of a parameter after experts went from 2 ranks to 4", furthest, "")
    for name, value in model.items():
        torch.testing.assert_close(changed.state["model"][name], value, rtol=1e-3, atol=1e-5)
