"""`everstep rehearse` on scripts that keep what depends on the number of ranks: a rank joins and leaves, and others go
on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(600)

# A layer whose output is scaled by the number of ranks, which `REMEMBERS` takes from an earlier step.
SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import dropout, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(14)
X = torch.randn(480, 8)
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))


class GlobalMean(nn.Linear):
    def forward(self, x):
        now = dist.get_world_size()
        self.ranks = REMEMBERS
        return dropout(super().forward(x) * (self.ranks * len(x) / 24), 0.1)


with everstep.start("commits", every_steps=5) as run:
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), GlobalMean(16, 16), nn.Linear(16, 1)))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, opt=opt)
    for step in run.steps(run.loader(DATA, global_batch=24), until=120):
        with step as batch:
            x, y = batch.data
            batch.scale(mse_loss(model(x), y)).backward()
            opt.step()
            opt.zero_grad()
"""
RANKS = "model.module.2.ranks"


def rehearse(folder: Path, script: str) -> list[dict[str, Any]]:
    (folder / "train.py").write_text(script)
    done = play(folder, "--ranks", "2", "--steps", "12", "--kill", "size", "--limit", "200", seconds=550)
    assert [run["name"] for run in done.report["runs"]] == ["calm", "again", "more", "fewer"], done.shown
    return done.findings


@pytest.mark.long
def test_script_that_asks_for_the_number_of_ranks_in_each_step_is_no_finding(tmp_path: Path) -> None:
    assert rehearse(tmp_path, SCRIPT.replace("REMEMBERS", "now")) == []


@pytest.mark.long
def test_number_of_ranks_that_stays_behind_when_one_leaves_is_found_with_its_step(tmp_path: Path) -> None:
    """One that joins computes the same as the others, so it is not refused."""
    (found,) = rehearse(tmp_path, SCRIPT.replace("REMEMBERS", 'max(now, getattr(self, "ranks", 0))'))
    assert (found["kind"], found["step"], found["runs"]) == ("tracked", 6, ["one rank leaves, then one more"])
    assert {RANKS, "model", "opt"} == set(found["names"])
    assert f"{RANKS} is 2 on rank 0, 1 in a process that was started with 1 rank" in found["text"]


@pytest.mark.long
def test_number_of_ranks_of_the_first_step_is_refused_when_one_joins(tmp_path: Path) -> None:
    findings = rehearse(tmp_path, SCRIPT.replace("REMEMBERS", 'getattr(self, "ranks", now)'))
    (refused,) = (found for found in findings if found["kind"] == "refused")
    assert refused["runs"] == ["one rank joins, then one fewer"]
    assert "model.module[2].ranks (train.py:" in refused["text"]


@pytest.mark.long
def test_share_of_a_batch_that_is_computed_before_the_loop_is_found(tmp_path: Path) -> None:
    script = SCRIPT.replace("REMEMBERS", "now").replace("x, y = batch.data", "x, y = (t[:share] for t in batch.data)")
    script = script.replace("    for step in", "    share = 24 // run.world_size\n    for step in")
    findings = rehearse(tmp_path, script)
    assert any(found["certain"] and "share is 12" in found["text"] for found in findings), findings
