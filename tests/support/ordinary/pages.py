"""The Python examples of the pages for authors of scripts, as whole scripts that take seconds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from support.ordinary.ordinary_play import SIZE, difference, under_one_agent

AROUND = """
import os

import torch
import torch.distributed as dist
from torch.distributions import Categorical
from torch.nn.functional import mse_loss as loss_function
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import everstep

torch.manual_seed(0)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
x_test, y_test = torch.randn(8, 4), torch.randn(8, 1)
texts, x_texts = torch.randn(10, 480, 4), torch.randn(3, 96, 4)
criterion = loss_function


def Net():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = torch.nn.LSTM(4, 8, batch_first=True), torch.nn.Linear(8, 1)

    def forward(self, words, hidden):
        output, hidden = self.cell(words, hidden)
        return self.head(output), hidden


def Policy():
    return torch.nn.Linear(2, 3)


class Environment:
    def reset(self, seed):
        self.state = torch.randn(2, generator=torch.Generator().manual_seed(seed))

    def move(self, action):
        self.state = (self.state + 0.1 * (action - 1)).clamp(-2, 2)
        return -self.state.abs().sum()


def play(environment, policy, moves):
    states, actions, rewards = [], [], []
    for _ in range(moves):
        states.append(environment.state)
        with torch.no_grad():
            actions.append(Categorical(logits=policy(environment.state)).sample())
        rewards.append(environment.move(actions[-1]))
    return torch.stack(states), torch.stack(actions), torch.stack(rewards).flip(0).cumsum(0).flip(0)


"""
OF_ACCELERATE = "from accelerate import Accelerator\n\nfrom everstep.train.adapters.accelerate import start\n\n\n"
SMALLER = {
    "s3://bucket/run": "commits", "every_steps=100": "every_steps=4", "global_batch=96": "global_batch=24",
    "micro_batch=8": "micro_batch=4", "AdamW(model.parameters())": "AdamW(model.parameters(), lr=0.05)",
    "global_batch=512": "global_batch=24", "until=10_000": "until=12", "until=1_000": "until=12",
    "until=300": "until=12", "run.step < 300": "run.step < 12", "every=50": "every=5", "run.step % 50": "run.step % 5",
    "run.step == 50": "run.step == 5", "run.step < 50": "run.step < 5",
}  # fmt: skip


def blocks(page: Path, title: str) -> list[str]:
    """The examples of the section `title`, each as a script."""
    section = page.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    found = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert found, title
    around = {block: AROUND + (OF_ACCELERATE if "Accelerator(" in block else "") for block in found}
    return [around[block] + smaller(block) for block in found]


def smaller(block: str, changes: Mapping[str, str] = SMALLER) -> str:
    for shown, here in changes.items():
        block = block.replace(shown, here)
    return block


def check_kills(tmp_path: Path, text: str, kills: Iterable[str]) -> None:
    """Assert that the script with each kill of one rank ends as the undisturbed one, to the bit."""
    script = tmp_path / "train.py"
    script.write_text(text)
    (tmp_path / "undisturbed").mkdir()
    first = under_one_agent(tmp_path / "undisturbed", script)
    assert not (found := difference(first, None, "", 0.0)), f"{found}\n{first.log[-3000:]}"
    for kill in kills:
        folder = tmp_path / kill.replace(":", "-")
        folder.mkdir()
        played = under_one_agent(folder, script, kill)
        assert played.killed, played.log[-3000:]
        assert not (found := difference(played, first, "", 0.0)), f"{kill}: {found}\n{played.log[-3000:]}"
        assert played.began == SIZE + 1, f"{kill}: {played.began} processes took steps"
