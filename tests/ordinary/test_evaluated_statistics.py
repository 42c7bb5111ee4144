"""An evaluation with running statistics decides the rate: it reads rank 0's on all ranks, as the docs advise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.ordinary.ordinary_play import under_one_agent

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import everstep

torch.manual_seed(0)
x = torch.randn(96, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
kept = {"loss": 0.0}
with everstep.start("commits", every_steps=4) as run:
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer, kept=kept)

    def evaluate():
        for buffer in model.module.buffers():
            dist.broadcast(buffer, 0)
        model.eval()
        with torch.no_grad():
            loss = mse_loss(model.module(x[run.rank :: run.world_size]), x[run.rank :: run.world_size].sum(1, True))
        dist.all_reduce(loss)
        kept["loss"] = loss.item()

    run.evaluate(evaluate, every=3)
    for step in run.steps(run.loader(dataset, global_batch=24, seed=0), until=12):
        with step as batch:
            data, target = batch.data
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + kept["loss"])
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
    if run.rank == 0:
        print("ended with", kept["loss"], [p.tolist() for p in model.parameters()], flush=True)
"""


@pytest.mark.timeout(360)
def test_evaluation_with_rank_0s_statistics_is_the_same_after_a_loss(tmp_path: Path) -> None:
    ended = {}
    for kill in ("", "1@6:evaluate"):
        folder = tmp_path / (kill.partition("@")[0] or "calm")
        folder.mkdir()
        script = folder / "script.py"
        script.write_text(SCRIPT)
        played = under_one_agent(folder, script, kill)
        assert (played.codes[0], played.killed) == (0, bool(kill)), played.log[-3000:]
        (ended[kill],) = re.findall("ended with .*", played.log)
    assert ended["1@6:evaluate"] == ended[""]
