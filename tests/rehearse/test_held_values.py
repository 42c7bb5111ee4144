"""`everstep rehearse` names an attribute of a tracked module by which it trains, although a state_dict has it not."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(900)

SCRIPT = """
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import everstep

torch.manual_seed(0)
X = torch.randn(96, 8)
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.beta = torch.nn.Linear(8, 1), 0.0

    def forward(self, x):
        self.beta += 0.5
        return self.body(x) * (1 + self.beta)


with everstep.start("commits", every_steps=5) as run:
    model = DDP(Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, opt=opt)
    for step in run.steps(run.loader(DATA, global_batch=8), until=40):
        with step as batch:
            x, y = batch.data
            batch.scale(mse_loss(model(x), y)).backward()
            opt.step()
            opt.zero_grad()
"""


@pytest.mark.long
def test_attribute_of_a_tracked_module_by_which_it_trains_is_named_where_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--ranks", "2", "--steps", "12", "--limit", "800", "--at", "0+1@8:backward")
    (refused,) = [one for one in play(tmp_path, *options, seconds=850).findings if one["certain"]]
    assert refused["kind"] == "refused"
    assert "model.module.beta" in refused["text"]
