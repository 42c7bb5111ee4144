"""Schedules inside of schedules: tracked by the outer one, and equal bits after a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.processes.warm_python import warm

pytestmark = pytest.mark.timeout(240)

SCRIPT = """
import os, signal, sys
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler, CosineAnnealingLR, ExponentialLR, LinearLR, LRScheduler, MultiStepLR, ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import SWALR

import everstep


class Warmup(LRScheduler):
    '''As the libraries have it: the schedule that follows is an attribute.'''

    def __init__(self, optimizer, steps, after):
        self.steps, self.after_scheduler = steps, after
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch < self.steps:
            return [base * (self.last_epoch + 1) / (self.steps + 1) for base in self.base_lrs]
        return self.after_scheduler.get_last_lr()

    def step(self, epoch=None):
        if getattr(self, "last_epoch", -1) >= self.steps:
            self.after_scheduler.step()
        super().step()


class Careful(Warmup):
    '''The same, with the inner state in its own.'''

    def state_dict(self):
        return {**super().state_dict(), "after_scheduler": self.after_scheduler.state_dict()}

    def load_state_dict(self, state):
        inner = state["after_scheduler"]
        super().load_state_dict({k: v for k, v in state.items() if k != "after_scheduler"})
        self.after_scheduler.load_state_dict(inner)


def sequential(o):
    return SequentialLR(o, [LinearLR(o, 0.1, total_iters=3), CosineAnnealingLR(o, 9)], [3])

def chained(o):
    return ChainedScheduler([LinearLR(o, 0.1, total_iters=3), ExponentialLR(o, 0.9)])

MAKE = {
    "sequential": sequential,
    "chained": chained,
    "chained in sequential": lambda o: SequentialLR(o, [chained(o), ExponentialLR(o, 0.8)], [4]),
    "sequential in sequential": lambda o: SequentialLR(o, [sequential(o), ExponentialLR(o, 0.8)], [4]),
    "sequential in chained": lambda o: ChainedScheduler([sequential(o), ExponentialLR(o, 0.9)]),
    "swa in sequential": lambda o: SequentialLR(o, [sequential(o), SWALR(o, swa_lr=0.01, anneal_epochs=4)], [5]),
    "steps in sequential": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=7), MultiStepLR(o, [2, 2, 3])], [7]),
    "attribute": lambda o: Warmup(o, 3, CosineAnnealingLR(o, 9)),
    "attribute in state": lambda o: Careful(o, 3, CosineAnnealingLR(o, 9)),
    "attribute in sequential": lambda o: SequentialLR(o, [Careful(o, 3, sequential(o)), ExponentialLR(o, 0.9)], [7]),
}

torch.set_num_threads(1)
torch.manual_seed(0)
with everstep.start(sys.argv[2], every_steps=2) as run:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = MAKE[sys.argv[1]](optimizer)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for step in run.steps(run.loader(list(torch.linspace(-1, 1, 60).reshape(20, 3)), global_batch=5), until=12):
        with step as batch:
            optimizer.zero_grad()
            model(batch.data).square().mean().backward()
            optimizer.step()
            schedule.step()
        if step.number == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
    found = [p.detach().numpy().tobytes().hex() for p in model.parameters()]
    print("end", found, optimizer.param_groups[0]["lr"].hex(), flush=True)
"""
KEPT = (
    "sequential", "chained", "chained in sequential", "sequential in sequential", "sequential in chained",
    "swa in sequential", "attribute", "attribute in state", "attribute in sequential",
)  # fmt: skip


def play(folder: Path, name: str, commits: str, kill: int = -1) -> tuple[int, str, str]:
    (folder / "train.py").write_text(SCRIPT)
    ended = warm().run(
        "train.py", name, str(folder / commits), str(kill), cwd=folder, timeout=100, env=dict(os.environ)
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.long_but("attribute in state")
@pytest.mark.parametrize("name", KEPT)
def test_a_schedule_inside_of_another_goes_on_with_equal_bits_after_a_kill(name: str, tmp_path: Path) -> None:
    code, whole, said = play(tmp_path, name, "whole")
    assert code == 0, said
    for kill in (5, 9):
        code, _, said = play(tmp_path, name, "killed", kill)
        assert code == -signal.SIGKILL, said
    code, resumed, said = play(tmp_path, name, "killed")
    assert code == 0, said
    assert "end" in whole
    assert resumed == whole
