"""Each Python block of docs/reference/session.md runs as it is written, but for smaller numbers and another folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "session.md"
AROUND = """
import os, sys
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
    os.environ[name] = value
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import everstep, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss as criterion
from torch.nn.parallel import DistributedDataParallel

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

done = []
def download(): done.append("download")
def new_name(): return "name"
def score(model, rank, world_size): return 1.0
x = torch.randn(64, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
"""
CHANGES = {
    "s3://bucket/run": "commits", "until=10_000": "until=4", "global_batch=512": "global_batch=8",
    "every=500": "every=2", "num_workers=2": "num_workers=0", "shard=8": "shard=1",
    "tensor=8": "tensor=1",
}  # fmt: skip


def blocks() -> list[str]:
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for said, here in CHANGES.items():
        assert any(said in block for block in found), said
        found = [block.replace(said, here) for block in found]
    return found


@pytest.mark.parametrize("number", range(5))
@pytest.mark.timeout(240)
def test_a_block_of_the_page_runs_as_it_is_written(number: int, tmp_path: Path) -> None:
    found = blocks()
    assert len(found) == 5
    (tmp_path / "train.py").write_text(AROUND + found[number] + "\nprint('steps', run.step)\n")
    ended = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "steps 4" in ended.stdout
