"""examples/zero: a rank holds its share of the state, commits load in any number of shards, kills leave no trace."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import everstep
from support.recipes.recipes import BIN, PROGRAMS, differences, disturbed, kill, undisturbed
from support.recipes.recorded import record

pytestmark = pytest.mark.timeout(300)
NAME = "zero"
ARGUMENTS = ("--steps", "50", "--every-steps", "20")
LAST = 4 * (64 * 10 + 10)  # bytes of the model's last layer
SCRIPT = PROGRAMS / "zero_memory.py"


def torchrun(ranks: int, *arguments: str | Path) -> None:
    done = subprocess.run(
        [BIN / "torchrun", "--standalone", "--nproc-per-node", str(ranks), SCRIPT, *map(str, arguments)],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_killed_worker_leaves_no_trace(tmp_path: Path) -> None:
    calm = undisturbed(NAME, tmp_path / "calm", ARGUMENTS, processes=4)
    hit = disturbed(NAME, tmp_path / "hit", ARGUMENTS, processes=4, at=[kill(NAME, 15, 35, workers=4)])
    assert hit.status()["restarts"] == 1, hit.output
    changed = differences(calm, hit)
    record(NAME, "values that a kill changes", len(changed), "")
    assert changed == []


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.long), 3])
def test_a_rank_holds_its_share(tmp_path: Path, stage: int) -> None:
    whole: dict[str, int] = {}
    for ranks in (1, 2, 4):
        shares = []
        torchrun(ranks, tmp_path / "held", str(stage))
        for rank in range(ranks):
            held = json.loads((tmp_path / f"held-{ranks}-{rank}.json").read_text())
            between = held.pop("between the passes")
            whole = whole or held
            # Stage 2 keeps the gathered parameters from the forward to the backward pass; stage 3 those of the last
            # layer, which is needed again at once.
            gathered = whole["parameters"] if stage == 2 else LAST
            expected = gathered + (whole["parameters"] - gathered) / ranks
            assert between == pytest.approx(expected, rel=0.02), (ranks, rank)
            # Divided by rows: what is left over makes a rank's part a little larger or smaller.
            for what, size in held.items():
                shares.append(size / whole[what])
                assert size == pytest.approx(whole[what] / ranks, rel=0.02), (what, ranks, rank)
        if stage == 3 and ranks > 1:
            figure = f"largest share of parameters, gradients or optimizer state on a rank of {ranks} (stage 3)"
            record(NAME, figure, max(shares), "", expected=1 / ranks)


@pytest.mark.turns(2)
def test_a_commit_goes_from_four_shards_to_two_to_three(tmp_path: Path) -> None:
    four = undisturbed(NAME, tmp_path, ("--steps", "3", "--shard", "4"), processes=4)
    torchrun(2, tmp_path, "3", tmp_path / "commits")
    torchrun(3, tmp_path, "3", tmp_path / "commits-2")
    loaded = everstep.load(tmp_path / "commits-2-3").state
    kept = {name: four.state[name] for name in ("model", "optimizer")}
    changed = differences(replace(four, step=1, state=kept), replace(four, step=1, state=loaded))
    record(NAME, "values that differ after 4 shards became 2 and then 3", len(changed), "")
    assert changed == []
