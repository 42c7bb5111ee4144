"""`run.check_sync`: the first tensor that differs between ranks is named, with its rank, on all of them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from support.processes import warm_agent
from support.processes.warm_python import warm

pytestmark = pytest.mark.timeout(200)
SCRIPT = """
import everstep, torch
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(96, 4)
with everstep.start() as run:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 70_000), torch.nn.ReLU(), torch.nn.Linear(70_000, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run.track(model=model, optimizer=optimizer)
    run.check_sync(every=3)
    loader = run.loader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), global_batch=12)
    for step in run.steps(loader, until=6):
        with step as batch:
            images, labels = batch.data
            batch.scale(torch.nn.functional.mse_loss(model(images), labels)).backward()
            optimizer.step()
            optimizer.zero_grad()
            DRIFT
print("steps", run.step)
"""
# Behind the first bytes of the tensor, which are all that is looked at in any case.
DRIFT = """if step.number == 4 and run.rank == 1:
                with torch.no_grad():
                    model.module[0].weight[-1, -1] += 1e-6"""


def run(tmp_path: Path, drift: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("DRIFT", drift))
    flags = ("--standalone", "--nproc-per-node", "2")
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    return warm().run(warm_agent.__file__, *flags, script, timeout=150, cwd=tmp_path, env=environ)


def test_ranks_that_are_alike_go_on(tmp_path: Path) -> None:
    done = run(tmp_path, "")
    assert done.stdout.count("steps 6") == 2, done.stderr


def test_the_first_tensor_that_differs_is_named_with_its_rank(tmp_path: Path) -> None:
    done = run(tmp_path, DRIFT)
    assert done.returncode != 0
    found = re.findall(
        r"LoopError: run.check_sync\(\): rank 1 has another model\.0\.weight than rank 0, of 1 of 4", done.stderr
    )
    assert len(found) >= 2, done.stderr[-3000:]
