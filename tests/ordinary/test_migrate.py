"""The script of docs/how-to-migrate.md, in the three processes of one `everstep-run`, of which one is killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.ordinary.ordinary_play import SIZE, difference, under_one_agent

pytestmark = pytest.mark.timeout(360)

PAGE = Path(__file__).parents[2] / "docs/how-to-migrate.md"
AROUND = """
import torch
from torch.nn.functional import mse_loss as loss_function
from torch.utils.data import TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sum(1, keepdim=True))


def Net():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


"""
CHANGES = {"every_steps=100": "every_steps=4", "global_batch=96": "global_batch=24", "until=300": "until=12"}


def test_script_of_the_page_ends_as_undisturbed_when_a_rank_is_killed(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for said, here in CHANGES.items():
        assert said in block
        block = block.replace(said, here)
    script = tmp_path / "train.py"
    script.write_text(AROUND + block)
    for name in ("calm", "hit"):
        (tmp_path / name).mkdir()
    calm = under_one_agent(tmp_path / "calm", script)
    assert not (found := difference(calm, None, "", 0.0)), f"{found}\n{calm.log[-3000:]}"
    hit = under_one_agent(tmp_path / "hit", script, "5:backward")
    assert hit.killed, hit.log[-3000:]
    assert not (found := difference(hit, calm, "", 0.0)), f"{found}\n{hit.log[-3000:]}"
    assert hit.began == SIZE + 1
