"""`everstep rehearse` compares values that have no names inside, and what a lost step has consumed of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(900)

SCRIPT = """
import argparse
import collections
import random

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import everstep

torch.manual_seed(0)
X = torch.randn(96, 8)
DATA = TensorDataset(X, X.sum(1, keepdim=True))
seen, recent, args = collections.Counter(), collections.deque([0] * 8, maxlen=8), argparse.Namespace(best=9.0)
ticks, dice = iter(range(1000)), random.Random(7)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.beta = torch.nn.Linear(8, 1), 0.0

    def forward(self, x):
        self.beta += 0.5
        out = self.body(x)
        return PENALTY


def plateau():
    best = 9.0
    while True:
        best += yield best


def clip(norm, norms=[]):
    norms.append(norm)


rates = plateau()
next(rates)
with everstep.start("commits", every_steps=5) as run:
    model = DDP(Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, opt=opt)
    for step in run.steps(run.loader(DATA, global_batch=8), until=40):
        with step as batch:
            x, y = batch.data
            next(ticks)
            loss = mse_loss(model(x), y)
            batch.scale(loss).backward()
            opt.step()
            opt.zero_grad()
            seen[step.number % 2] += 1
            recent.append(step.number - loss.item())
            args.best += loss.item()
            rates.send(loss.item())
            clip(loss.item())
        if step.completed:
            dice.random()
"""


def rehearse(folder: Path, penalty: str, *options: str) -> list[dict[str, Any]]:
    (folder / "train.py").write_text(SCRIPT.replace("PENALTY", penalty))
    return play(folder, "--ranks", "2", "--steps", "12", "--limit", "800", *options, seconds=850).findings


def test_each_kind_of_value_that_a_new_process_lacks_is_named_with_its_step(tmp_path: Path) -> None:
    (held,) = rehearse(tmp_path, "out", "--at", "1@8:backward")
    assert (held["kind"], held["certain"], held["step"]) == ("held", False, 9)
    assert {re.split(r"[.\[]", name)[0] for name in held["names"]} == {
        "seen", "recent", "args", "ticks", "rates", "dice", "clip", "model",
    }  # fmt: skip
    assert "model.module.beta" in held["names"]


@pytest.mark.long
def test_attribute_of_a_tracked_module_by_which_it_trains_is_named_where_the_run_is_refused(tmp_path: Path) -> None:
    found = rehearse(tmp_path, "out * (1 + self.beta)", "--at", "0+1@8:backward")
    (refused,) = [one for one in found if one["certain"]]
    assert refused["kind"] == "refused"
    assert "model.module.beta" in refused["text"]
