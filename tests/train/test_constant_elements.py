"""An element of a constant list is bound to a variable of the loop: the list is carried only if a step changes it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import everstep

ROWS = torch.arange(20).split(4)


def train(folder: Path) -> int:
    x, rows = torch.ones(20, 3), list(ROWS)
    with everstep.start(folder, every_steps=100) as run:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(until=4):
            with step:
                part = rows[step.number]
                model(x[part]).sum().backward()
                rows[step.number] = part.flip(0)
                optimizer.step()
                optimizer.zero_grad()
    return run.step


def train_constant(folder: Path) -> int:
    x, rows = torch.ones(20, 3), list(ROWS)
    with everstep.start(folder, every_steps=100) as run:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(until=4):
            with step:
                part = rows[step.number]
                model(x[part]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return run.step


@pytest.mark.long_but("train-True")
@pytest.mark.parametrize(("play", "named"), [(train_constant, False), (train, True)])
def test_list_is_carried_only_if_a_step_replaces_an_element(
    play: Callable[[Path], int], named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "everstep.train"):
        assert play(tmp_path) == 4
    assert ("carried by the loop and not tracked: rows (" in caplog.text) == named
