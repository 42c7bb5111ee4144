"""A structure that changes in the loop is refused by name, and no commit is made that its own script cannot load."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations, prune

import everstep
from everstep.recovery.errors import LoopError
from everstep.train.coordination.structure import StructureCheck
from support.processes.commits import commits


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc(self.body(x) * self.scale)
        return found


Change = Callable[[Net, torch.optim.Optimizer], object]


@dataclass(frozen=True)
class Row:
    """What a script does before step 5, and what the refusal names. `before`: before its loop."""

    change: Change
    names: str
    before: Change = lambda model, optimizer: None


def replaced(outputs: int) -> Change:
    def change(model: Net, optimizer: torch.optim.Optimizer) -> None:
        model.fc = torch.nn.Linear(3, outputs)

    return change


ROWS = {
    "pruned": Row(
        lambda m, o: prune.l1_unstructured(m.body, "weight", 0.5),
        r"model\.body\.weight_orig, model\.body\.weight_mask came; model\.body\.weight went",
    ),
    "pruning made permanent": Row(
        lambda m, o: prune.remove(m.body, "weight"),
        r"model\.body\.weight came; model\.body\.weight_orig, model\.body\.weight_mask went",
        lambda m, o: prune.l1_unstructured(m.body, "weight", 0.5),
    ),
    "parametrized": Row(
        lambda m, o: parametrizations.weight_norm(m.body),
        r"model\.body\.parametrizations\.weight\.original0.* came; model\.body\.weight went",
    ),
    "a layer added": Row(
        lambda m, o: m.add_module("extra", torch.nn.Linear(2, 2)), r"model\.extra\.weight, model\.extra\.bias came"
    ),
    "the head replaced": Row(replaced(1), r"model\.fc\.weight has shape \[1, 3\], and had \[2, 3\]"),
    "the head replaced by one of its size": Row(
        replaced(2), r"group 0 of optimizer holds parameters that no tracked module holds any more"
    ),
    "a parameter taken away": Row(lambda m, o: m.fc.register_parameter("bias", None), r"model\.fc\.bias went"),
    "a buffer added": Row(
        lambda m, o: m.register_buffer("late", torch.zeros(2)), r"model\.late came\. A new process makes"
    ),
    "a parameter of a group taken away": Row(
        lambda m, o: o.param_groups[0]["params"].pop(), r"group 0 of optimizer has 3 parameters, and had 4"
    ),
}


def wait_for_commits(folder: Path, count: int) -> None:
    for _ in range(600):
        if len(commits(folder)) >= count:
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"{commits(folder)} after half a minute")


def train(folder: Path, until: int, change: Change, before: Change, *, at: int = 5, every: int = 4) -> Net:
    """`change` comes in the step `at`, counted from 0."""
    torch.manual_seed(0)
    x = torch.randn(48, 4)
    dataset = torch.utils.data.TensorDataset(x, x[:, :2] * 2)
    with everstep.start(folder / "commits", every_steps=every) as run:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        before(model, optimizer)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(run.loader(dataset, global_batch=6), until=until):
            if step.number == at:
                wait_for_commits(folder, at // every)
                schedule = run._coordinator.schedule
                assert schedule is not None
                assert schedule.checkpointer.wait(60), "the next save would be left out"
                change(model, optimizer)
            with step as batch:
                data, target = batch.data
                found = model(data)
                batch.scale(mse_loss(found, target[:, : found.shape[1]])).backward()
                optimizer.step()
                model.zero_grad()
    return model


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_change_in_the_loop_is_refused_before_a_commit_has_it(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    with pytest.raises(LoopError, match=row.names) as told:
        train(tmp_path, 12, row.change, row.before)
    assert re.search(r"It changed between step 4 and step 8:.* before the loop", str(told.value))
    assert len(str(told.value)) < 6 * 160
    assert commits(tmp_path) == [4]
    train(tmp_path, 8, lambda model, optimizer: None, row.before)  # what is committed can be gone on from


def test_change_is_found_at_a_save_between_the_compared_steps(tmp_path: Path) -> None:
    row = ROWS["pruned"]
    with pytest.raises(LoopError, match="It changed between step 4 and step 6: model"):
        train(tmp_path, 12, row.change, row.before, every=3)
    assert commits(tmp_path) == [3]


def test_change_in_the_first_step_is_refused_after_it(tmp_path: Path) -> None:
    row = ROWS["a layer added"]
    with pytest.raises(LoopError, match="It changed in step 1: model"):
        train(tmp_path, 12, row.change, row.before, at=0)
    assert commits(tmp_path) == []


@pytest.mark.long
def test_change_before_the_loop_is_none_and_its_commits_are_gone_on_from(tmp_path: Path) -> None:
    def nothing(model: Net, optimizer: torch.optim.Optimizer) -> None: ...

    change = ROWS["pruned"].change
    train(tmp_path / "a", 4, nothing, change)
    resumed, whole = train(tmp_path / "a", 8, nothing, change), train(tmp_path / "b", 8, nothing, change)
    assert all(
        torch.equal(a, b) for a, b in zip(resumed.state_dict().values(), whole.state_dict().values(), strict=True)
    )


def test_sizes_of_buffers_are_part_of_the_structure_only_where_nothing_saves_them() -> None:
    net = Net()
    check = StructureCheck({"model": net})
    net.scale = torch.ones(3)
    with pytest.raises(LoopError, match=r"model\.scale has shape \[3\], and had \[1\]"):
        check.check(1)
