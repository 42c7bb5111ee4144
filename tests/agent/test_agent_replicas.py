"""Replicas stay replicas: the loop that the documentation shows, and loops whose gradients nobody averages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint import Catalog
from everstep.storage import open_store
from support.processes import warm_agent
from support.processes.warm_python import warm

pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).resolve().parents[2]

# What stands around the snippet of docs/reference/session.md.
BEFORE = """
import json, os, sys
import torch, xxhash
from torch.nn.functional import mse_loss as criterion
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
torch.manual_seed(0)

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

x = torch.randn(64, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
"""
AFTER = """
said = xxhash.xxh3_64_hexdigest(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
with open(f"rank-{run.rank}.json", "w") as file:
    json.dump({"step": run.step, "world": run.world_size, "parameters": said}, file)
"""
LOOP = """
import everstep

with everstep.start("commits") as run:
    model = MODEL
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))  # begins at 0
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    loader = run.loader(dataset, global_batch=8)
    for step in run.steps(loader, until=20):
        with step as batch:
            optimizer.zero_grad()
            batch.scale(criterion(model(batch.data[0]), batch.data[1])).backward()
            for p in model.parameters():
                AVERAGE
            optimizer.step()
            schedule.step()
"""
AVERAGED = "torch.distributed.all_reduce(p.grad); p.grad /= run.world_size"


def snippet() -> str:
    """The first Python block of the session's page, for a few steps."""
    text = (ROOT / "docs" / "reference" / "session.md").read_text()
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    code = found[1]
    changes = {"until=1_000": "until=12", "global_batch=512": "global_batch=8"}
    for said, here in changes.items():
        assert said in code
        code = code.replace(said, here)
    return code


def play(folder: Path, code: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(BEFORE + code + AFTER)
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    return warm().run(*launcher, "--nproc-per-node=2", "train.py", cwd=folder, timeout=120, env=variables)


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


EVERSTEP_RUN = (warm_agent.__file__,)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


@pytest.mark.long
@pytest.mark.parametrize("launcher", [EVERSTEP_RUN, TORCHRUN], ids=["everstep-run", "torchrun"])
def test_loop_of_the_documentation_trains_equal_replicas(launcher: tuple[str, ...], tmp_path: Path) -> None:
    ended = play(tmp_path, snippet(), *launcher)
    assert ended.returncode == 0, ended.stderr
    first, second = told(tmp_path)
    assert first == second
    assert (first["step"], first["world"]) == (12, 2)
    assert [found.step for found in Catalog(open_store(str(tmp_path / "commits"))).list()] == [12]


# Who compares the replicas is the session, whatever started it.
@pytest.mark.long
@pytest.mark.parametrize("launcher", [EVERSTEP_RUN, TORCHRUN], ids=["everstep-run", "torchrun"])
def test_gradients_that_nobody_averages_are_refused_though_the_learning_rate_begins_at_zero(
    launcher: tuple[str, ...], tmp_path: Path
) -> None:
    ended = play(tmp_path, LOOP.replace("MODEL", "Net()").replace("AVERAGE", "pass"), *launcher)
    assert ended.returncode == 1
    said = textwrap.dedent(ended.stderr)
    assert "after step 2 of this world its 2 ranks hold different parameters, model.weight among them" in said
    assert "model = DistributedDataParallel(model)" in said
    assert Catalog(open_store(str(tmp_path / "commits"))).list() == ()


@pytest.mark.long
def test_gradients_that_the_loop_averages_itself_are_its_own_business(tmp_path: Path) -> None:
    ended = play(tmp_path, LOOP.replace("MODEL", "Net()").replace("AVERAGE", AVERAGED), *EVERSTEP_RUN)
    assert ended.returncode == 0, ended.stderr
    first, second = told(tmp_path)
    assert first == second


def test_one_process_alone_needs_no_others(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BEFORE + snippet() + AFTER)
    ended = subprocess.run(
        [sys.executable, "-m", "everstep.agent.main", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "rank-0.json").read_text())["world"] == 1
