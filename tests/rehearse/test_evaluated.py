"""`everstep rehearse` kills a rank in an evaluation, and finds a metric that counts samples twice."""

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
held = torch.randn(24, 8)
metric = {"total": 0}
with everstep.start("commits", every_steps=100) as run:
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    run.untracked("metric")

    def evaluate():
        BEGINS
        model.eval()
        for i in range(0, 24, 8):
            with torch.no_grad():
                seen = torch.tensor(len(model(held[i + run.rank : i + 8 : run.world_size])))
            dist.all_reduce(seen)
            metric["total"] += seen.item()
            if run.rank == 0:
                print("batch", i)
        if run.rank == 0:
            print("evaluated", metric["total"])
        metric["total"] = 0

    run.evaluate(evaluate, every=5)
    for step in run.steps(run.loader(dataset, global_batch=12), until=10_000):
        with step as batch:
            data, target = batch.data
            batch.scale(mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.long
@pytest.mark.parametrize("begins", ["pass", 'metric["total"] = 0'])
def test_metric_that_counts_twice_what_a_lost_evaluation_has_added_is_found(begins: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("BEGINS", begins))
    done = play(tmp_path, "--ranks", "2", "--steps", "12", "--kill", "rank", "--limit", "200", seconds=330)
    assert [run["killed"] for run in done.report["runs"]] == [0, 0, 6], done.shown
    found = {finding["names"][0]: finding["text"] for finding in done.findings}
    if begins == "pass":
        assert found.keys() == {"stdout"}
        assert "rank 0 printed 'evaluated 32', and 'evaluated 24' in the calm run" in found["stdout"]
    else:
        assert found == {}, "and the lines of the lost evaluation count once"


EPOCHS = """
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import everstep

torch.manual_seed(0)
x = torch.randn(96, 8)
run = everstep.start("commits", every_steps=100)
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run.track(model=model, optimizer=optimizer)
loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=12, shuffle=True)


def learn(data, target):
    run.scale(mse_loss(model(data), target)).backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in LOOP:
    run.train(lambda batch: learn(*batch.data))
    run.evaluate(model.eval)
run.close()
print("all steps are done")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "loop",
    [
        "zip(run.epochs(loader, 50), range(50))",  # the rehearsal ends the run
        "zip(range(3), run.epochs(loader, 3))",  # `zip` does not ask for a fourth epoch
    ],
)
def test_rank_that_is_lost_behind_the_last_evaluation_leaves_a_run_that_ends(loop: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EPOCHS.replace("LOOP", loop))
    done = play(
        tmp_path, "--ranks", "2", "--steps", "12", "--kill", "rank", "--at", "1@12:evaluated", "--limit", "200",
        seconds=330,
    )  # fmt: skip
    assert [run["killed"] for run in done.report["runs"]] == [0, 0, 1], done.shown
    assert done.code == 0, done.shown
    assert done.findings == []


ACCELERATED = """
import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from everstep.train.adapters.accelerate import start

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
x = torch.randn(96, 8)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=12, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
run = start(accelerator, "commits", every_steps=100)
for _ in run.epochs(50):
    for data, target in loader:
        accelerator.backward(mse_loss(model(data), target))
        optimizer.step()
        optimizer.zero_grad()
    run.evaluate(model.eval)
run.close()
"""


@pytest.mark.long
def test_rank_that_is_lost_where_a_rehearsal_ends_a_loop_of_accelerate_leaves_a_run_that_ends(tmp_path: Path) -> None:
    """In the middle of an epoch: the process that comes has steps of it left, and the others have enough."""
    (tmp_path / "train.py").write_text(ACCELERATED)
    done = play(
        tmp_path, "--ranks", "2", "--steps", "14", "--kill", "rank", "--at", "1@14:evaluated", "--limit", "100",
        seconds=330,
    )  # fmt: skip
    assert [run["killed"] for run in done.report["runs"]] == [0, 0, 1], done.shown
    assert done.code == 0, done.shown
    assert done.findings == []
