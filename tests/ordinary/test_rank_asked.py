"""A step that asks for its rank: a new process is not compared, and its log says so with what may be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.ordinary.ordinary_play import under_one_agent

SCRIPT = """
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import everstep


class Count:
    calls = 0


class Net(torch.nn.Linear):
    def forward(self, x):
        Count.calls += 1
        return super().forward(x) / (1 + 0.01 * Count.calls)


torch.manual_seed(0)
x = torch.randn(96, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
with everstep.start("commits", every_steps=4) as run:
    model = DistributedDataParallel(Net(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=24), until=12):
        with step as batch:
            data, target = batch.data
            loss = mse_loss(model(data), target)
            ASKS
            batch.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
"""
ASKS = "if run.rank == 0: print(loss.item())"


@pytest.mark.long_but("not asked")
@pytest.mark.timeout(360)
@pytest.mark.parametrize("asks", [ASKS, "pass"], ids=["asked", "not asked"])
def test_new_process_that_is_not_compared_says_so_and_what_differs(asks: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("ASKS", asks))
    played = under_one_agent(tmp_path, script, "1@6:backward")
    assert (played.codes[0] == 0) is (asks == ASKS), played.log[-3000:]
    assert ("this new process is not compared" in played.log) is (asks == ASKS), played.log[-3000:]
    assert "Count.calls" in played.log
