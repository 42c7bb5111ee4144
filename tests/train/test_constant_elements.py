"""An element of a constant list is bound to a variable of the loop: it is not carried from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import everstep
from everstep.recovery.errors import LoopError

ROWS = torch.arange(20).split(4)


def train(folder: Path, order: Sequence[int], replaced: bool = False) -> int:
    x, rows = torch.ones(20, 3), list(ROWS)
    with everstep.start(folder, every_steps=100) as run:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(until=len(order)):
            with step:
                part = rows[order[step.number]]
                model(x[part]).sum().backward()
                if replaced:
                    rows[order[step.number]] = part.flip(0)
                optimizer.step()
                optimizer.zero_grad()
    return run.step


def test_elements_of_a_constant_list_are_taken_in_turn(tmp_path: Path) -> None:
    assert train(tmp_path, (0, 1, 2, 3)) == 4


def test_an_element_that_a_step_replaces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoopError, match=r"carried from one step to the next"):
        train(tmp_path, (0, 1, 2, 3), replaced=True)
