"""What the ranks compare between steps, and what a commit may lack."""

from __future__ import annotations

import copy

import pytest
import torch

from everstep.checkpoint.state.capture import apply
from everstep.recovery.errors import LoopError
from everstep.train.guards.replicas import Replicas
from everstep.train.guards.untracked.covered import Covered
from everstep.train.once import KEY, Onces


class Averaged:
    """What is told of a `DistributedDataParallel` object here."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.parameters_to_ignore, self.broadcast_buffers = module, list[str](), True
        self.modules_buffers = list(module.buffers())


def test_averaged_parameters_that_differ_are_refused_after_the_last_step_at_the_latest() -> None:
    one = torch.nn.Linear(2, 1)
    other = copy.deepcopy(one)
    told: list[int] = []
    first = Replicas({"model": one}, [Averaged(one)])  # type: ignore[list-item]
    second = Replicas({"model": other}, [Averaged(other)])  # type: ignore[list-item]

    def say(number: int) -> bool:
        told.append(number)
        return True

    for _ in range(2):
        first.completed(2, say)
        second.completed(2, lambda number: number == told[-1])
    with torch.no_grad():
        other.weight.add_(1)
    first.completed(2, say)
    second.completed(2, lambda number: number == told[-1])  # the third step is not compared
    first.completed(2, say, last=True)
    with pytest.raises(LoopError, match=r"parameters, model\.weight among .* gradients.*run\.track\(kept=kept\)"):
        second.completed(2, lambda number: number == told[-1], last=True)


def test_tensors_of_a_tracked_optimizer_are_held_where_a_checkpoint_was_loaded_into_it() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    older = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2)
    older.step()
    saved = copy.deepcopy(older.state_dict())
    optimizer = torch.optim.AdamW([weight])
    optimizer.load_state_dict(saved)
    assert Covered({"optimizer": optimizer}).holds(saved["state"][0]["exp_avg"])


def test_commit_of_a_script_without_once_is_gone_on_from_by_one_that_has_it() -> None:
    onces = Onces({})
    onces.add(lambda: 3, "job")
    apply({KEY: onces.results}, {"state": {}}, {}, 0)
    assert onces.results == {}
    assert not onces.done
