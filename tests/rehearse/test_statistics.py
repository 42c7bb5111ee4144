"""Running statistics of each rank's own are a warning of `everstep rehearse`, and what it advises ends the warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(360)

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(200, 8), torch.randn(200, 1))
with everstep.start("commits", every_steps=100) as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=10_000):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
"""
BACKWARD = "mse_loss(model(data), target)).backward()\n"
ALIKE = """            for buffer in model.module.buffers():
                if buffer.is_floating_point():
                    dist.all_reduce(buffer)
                    buffer /= run.world_size
"""


@pytest.mark.long
@pytest.mark.parametrize("remedy", ["", ALIKE])
def test_statistics_that_are_averaged_behind_backward_are_no_warning(remedy: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace(BACKWARD, BACKWARD + remedy))
    done = play(tmp_path, "--ranks", "2", "--steps", "12", "--at", "0@6:backward", "--limit", "200", seconds=330)
    assert [run["killed"] for run in done.report["runs"]][-1] == 1, done.shown
    texts = [finding["text"] for finding in done.findings if finding["names"] == ["the buffers of model"]]
    assert len(texts) == len(done.findings) == (0 if remedy else 1), done.shown
    for text in texts:
        assert "dist.all_reduce(buffer)" in text
