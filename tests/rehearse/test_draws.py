"""`everstep rehearse` warns of a script whose ranks draw the same samples, because all seed alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(900)

SCRIPT = """
import random

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
random.seed(0)
X = torch.randn(96, 8)


def rows():
    chosen = [random.randint(0, 95) for _ in range(8)]
    return X[PART]


with everstep.start("commits", every_steps=5RNG) as run:
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, opt=opt)
    for step in run.steps(until=40):
        with step:
            x = rows()
            mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            opt.step()
            opt.zero_grad()
"""
ALL, PART = "chosen", "chosen[run.rank::run.world_size]"


@pytest.mark.long_but("alike")
@pytest.mark.parametrize(
    ("part", "rng", "found"),
    [(ALL, "", [("draws", False, ["random"])]), (ALL, ', rng="rank"', []), (PART, "", [])],
    ids=["alike", "by rank", "each takes its part"],
)
def test_ranks_that_draw_the_same_samples_are_warned_of_and_get_no_stamp(
    tmp_path: Path, part: str, rng: str, found: list[tuple[str, bool, list[str]]]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("PART", part).replace("RNG", rng))
    done = play(tmp_path, "--ranks", "2", "--steps", "12", "--limit", "800", "--kill", "rank,all", seconds=850)
    assert [(one["kind"], one["certain"], one["names"]) for one in done.findings] == found
    assert bool(done.report["stamp"]) == (not found)
    assert done.code == 0


OWN = """
import random

import torch
import torch.distributed as dist

import everstep

dist.init_process_group("gloo")
torch.manual_seed(0)
random.seed(SEED)
X = torch.randn(96, 8)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
state = {"model": model, "opt": opt, "rng": everstep.RngState()}
checkpointer = everstep.Checkpointer("commits")
for number in range(checkpointer.restore(state) or 0, 40):
    x = X[[random.randint(0, 95) for _ in range(8)]]
    torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    opt.step()
    opt.zero_grad()
    if checkpointer.should_save(number + 1):
        checkpointer.save(number + 1, state)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "found"), [("0", [("draws", False, ["random"])]), ("dist.get_rank()", [])], ids=["alike", "by rank"]
)
def test_ranks_of_a_loop_of_the_scripts_own_that_draw_the_same_samples_are_warned_of(
    tmp_path: Path, seed: str, found: list[tuple[str, bool, list[str]]]
) -> None:
    (tmp_path / "train.py").write_text(OWN.replace("SEED", seed))
    done = play(tmp_path, "--ranks", "2", "--steps", "12", "--limit", "800", "--kill", "all", seconds=850)
    assert [(one["kind"], one["certain"], one["names"]) for one in done.findings] == found
    assert done.code == 0
