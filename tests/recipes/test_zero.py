"""examples/zero: a rank holds what its stage says, commits load in any number of shards, kills leave no trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import everstep
from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, differences, launched, script, undisturbed
from support.recipes.recorded import record

pytestmark = pytest.mark.timeout(300)
NAME = "zero"
ARGUMENTS = ("--steps", "50", "--every-steps", "20")
SCRIPT = PROGRAMS / "zero_memory.py"


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path) -> None:
    """Of stage 1 with offload a step has the most to lose: whole gradients, of some of its micro-batches."""
    arguments = (*ARGUMENTS, "--stage", "1", "--offload")
    calm = undisturbed(NAME, tmp_path / "calm", arguments, processes=4)
    figure = "values that a kill changes (stage 1, offload)"
    check_kill(NAME, tmp_path / "hit", calm, arguments, (15, 35), workers=4, figure=figure)


@pytest.mark.long
def test_a_killed_worker_of_torchs_own_stage_1_leaves_no_trace(tmp_path: Path) -> None:
    arguments = ("--steps", "30", "--every-steps", "10", "--stage", "1", "--optimizer", "zero_redundancy")
    calm = undisturbed(NAME, tmp_path / "calm", arguments, processes=2)
    figure = "values that a kill changes (ZeroRedundancyOptimizer)"
    check_kill(NAME, tmp_path / "hit", calm, arguments, (14, 18), workers=2, figure=figure)


def test_a_rank_holds_what_its_stage_says(tmp_path: Path) -> None:
    """Over the micro-batches of a step each stage leaves other things whole; between two steps none does."""
    stages = {"3": set[str](), "2": {"parameters"}, "1": {"parameters", "gradients"}}
    whole: dict[str, int] = {}
    for ranks in (1, 2, 4):
        launched(tmp_path, ranks, [SCRIPT, tmp_path / "held", ",".join([*stages, "1+offload", "torch"])])
        told = [json.loads((tmp_path / f"held-{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
        assert all(found["furthest"] < 1e-5 for rank in told for found in rank.values()), told
        whole = whole or told[0]["3"]["between"]
        for stage, left_whole in stages.items():
            sizes = [rank[stage] for rank in told]
            for found in sizes:
                # Divided by rows: what is left over makes a rank's part a little larger or smaller.
                for what, size in found["between"].items():
                    assert size == pytest.approx(whole[what] / ranks, rel=0.02), (stage, what, ranks)
                for what, size in found["within"].items():
                    expected = whole[what] / (1 if what in left_whole else ranks)
                    assert size == pytest.approx(expected, rel=0.02), (stage, what, ranks)
            if ranks > 1:
                most = max(sum(found["within"].values()) + found["between"]["optimizer"] for found in sizes)
                theory = sum(size / (1 if what in left_whole else ranks) for what, size in whole.items())
                figure = f"share of the whole state on a rank of {ranks}, within a step (stage {stage})"
                record(NAME, figure, most / sum(whole.values()), "", expected=theory / sum(whole.values()))
        check_torchs_own([rank["torch"] for rank in told], whole)


def check_torchs_own(sizes: list[dict[str, dict[str, int]]], whole: dict[str, int]) -> None:
    """ZeroRedundancyOptimizer divides by whole parameters, so its parts are not equal: the largest one has at most one
    parameter's state more than its share."""
    largest = max(p.nbytes for p in script(NAME).network().parameters())
    ranks, states = len(sizes), [found["between"]["optimizer"] for found in sizes]
    assert sum(states) == whole["optimizer"], "each state is on one rank"
    assert max(states) <= whole["optimizer"] / ranks + 2 * largest, states
    for found in sizes:
        assert found["within"] == {what: whole[what] for what in ("parameters", "gradients")}
    if ranks > 1:
        most = (whole["parameters"] + whole["gradients"] + max(states)) / sum(whole.values())
        figure = f"share of the whole state on a rank of {ranks}, within a step (ZeroRedundancyOptimizer)"
        record(NAME, figure, most, "", expected=(2 + 2 / ranks) / 4)


@pytest.mark.long
def test_a_commit_goes_from_four_shards_to_two_to_three(tmp_path: Path) -> None:
    four = undisturbed(NAME, tmp_path, ("--steps", "3", "--shard", "4"), processes=4)
    launched(tmp_path, 2, [SCRIPT, tmp_path, "3", tmp_path / "commits"])
    launched(tmp_path, 3, [SCRIPT, tmp_path, "3", tmp_path / "commits-2"])
    loaded = everstep.load(tmp_path / "commits-2-3").state
    kept = {name: four.state[name] for name in ("model", "optimizer")}
    changed = differences(replace(four, step=1, state=kept), replace(four, step=1, state=loaded))
    record(NAME, "values that differ after 4 shards became 2 and then 3", len(changed), "")
    assert changed == []
