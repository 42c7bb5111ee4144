"""`everstep rehearse` names the tensors and modules that a script holds and does not track."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep.rehearse import held_tensors as module
from everstep.rehearse.held_tensors import held_tensors
from everstep.rehearse.record import DIGEST
from everstep.train.guards.plain_values import Roots
from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(360)

SCRIPT = """
import copy
import os

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = torch.nn.LSTM(8, 8), torch.nn.Linear(8, 1)

    def forward(self, x, state):
        found, state = self.cell(x, state)
        return self.head(found), state


class Average:
    def __init__(self, net):
        self.shadow = {name: p.detach().clone() for name, p in net.named_parameters()}

    def update(self, net):
        for name, p in net.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)


torch.manual_seed(0)
dist.init_process_group("gloo")
x = torch.randn(40, 24, 8)
net = Reader()
model, average, teacher, hidden = DDP(net), Average(net), copy.deepcopy(net), None
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
state = {"model": net, "optimizer": optimizer}
TRACKED
checkpointer = everstep.Checkpointer("commits")
start = checkpointer.restore(state) or 0
for step in range(start, 1000):
    mine = x[step % 40, dist.get_rank() :: dist.get_world_size()].unsqueeze(0)
    optimizer.zero_grad()
    BODY
    mse_loss(output, mine.sum(2, keepdim=True)).backward()
    optimizer.step()
    average.update(net)
    if checkpointer.should_save(step + 1):
        checkpointer.save(step + 1, state)
"""
ANEW = "output, _ = model(mine, None)"
CARRIED = "output, hidden = model(mine, hidden)\n    hidden = tuple(one.detach() for one in hidden)"
AVERAGE = 'state["average"] = average.shadow'


def rehearse(folder: Path, body: str, tracked: str, *options: str) -> tuple[int, list[dict[str, Any]], str]:
    """The exit code, the findings, and what the terminal shows in one line."""
    (folder / "train.py").write_text(SCRIPT.replace("BODY", body).replace("TRACKED", tracked))
    done = play(folder, "--ranks", "2", "--steps", "12", "--limit", "200", *options, seconds=300)
    return done.code, done.findings, " ".join(done.shown.split())


def test_hidden_state_by_which_it_trains_is_named_with_its_step(tmp_path: Path) -> None:
    code, found, shown = rehearse(tmp_path, CARRIED, AVERAGE, "--at", "1@8:backward")
    (certain,) = [one for one in found if one["certain"]]
    assert (certain["kind"], certain["step"], code) == ("tracked", 6, 1), "the commit is of step 5"
    assert "hidden" in certain["names"]
    assert "hidden is not the same 2 tensors on rank" in shown


@pytest.mark.long
def test_average_that_nothing_reads_is_a_warning(tmp_path: Path) -> None:
    code, found, shown = rehearse(tmp_path, ANEW, "", "--at", "1@8:backward")
    assert [(one["kind"], one["certain"], one["names"]) for one in found] == [("held", False, ["average.shadow"])]
    assert "average.shadow is not the same 6 tensors on rank" in shown
    assert code == 0


@pytest.mark.long
def test_tensors_that_are_tracked_and_those_that_are_made_anew_give_no_finding(tmp_path: Path) -> None:
    code, found, _ = rehearse(tmp_path, ANEW, AVERAGE)
    assert (found, code) == ([], 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "names"),
    [
        (
            'rate = 0.01 * int(os.environ["WORLD_SIZE"])\n    optimizer.param_groups[0]["lr"] = rate',
            ["rate", "optimizer.param_groups[0]['lr']"],
        ),
        ("batch = 6 * dist.get_world_size()", ["batch"]),
    ],
    ids=["learning rate", "batch size"],
)
def test_number_that_grows_with_the_ranks_is_named(tmp_path: Path, body: str, names: list[str]) -> None:
    code, found, shown = rehearse(tmp_path, f"{ANEW}\n    {body}", AVERAGE, "--kill", "size")
    assert [one for one in found if one["certain"]] == []
    assert [sorted(one["names"]) for one in found if one["kind"] == "size"] == [sorted(names)]
    assert "grows with the number of ranks" in shown
    assert code == 0


def test_value_is_named_by_the_outermost_container_or_module() -> None:
    class Own:
        def __init__(self) -> None:
            self.queue = [torch.ones(2), (torch.ones(3), np.ones(4))]

    class Model(torch.nn.Linear):
        pass

    deep = torch.nn.Linear(2, 2)
    for _ in range(9):
        deep = torch.nn.Sequential(deep)  # type: ignore[assignment]
    model = Model(2, 2)
    model.memory = torch.ones(3)
    roots = {
        "own": Own(), "runs": {"a": Own()}, "ema": copy.deepcopy(torch.nn.Sequential(torch.nn.Linear(2, 2))),
        "model": model, "view": model.weight[0].detach(), "loss": model(torch.ones(2)).sum(), "x": torch.ones(5),
        "deep": deep, "result": model(torch.ones(1025, 2)),
    }  # fmt: skip
    found, beyond = held_tensors(Roots(None, {"model": model}, roots.items()))
    assert {name: text.partition(DIGEST)[0] for name, text in found.items()} == {
        "own.queue": "3 tensors", "runs['a'].queue": "3 tensors", "ema": "2 tensors", "deep": "2 tensors",
        "model.memory": "tensor of shape [3]", "x": "tensor of shape [5]", "loss": "tensor of shape []",
    }  # fmt: skip
    assert beyond == []


def test_other_bits_make_another_digest() -> None:
    def digest(value: object) -> str:
        return held_tensors(Roots(None, {}, [("x", value)]))[0]["x"]

    base = digest(torch.zeros(4))
    others = [torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.tensor([0, 0, 0, -0.0]), torch.zeros(5)]
    assert len({base, *map(digest, others), digest([torch.zeros(4)]), digest(np.zeros(4))}) == 7
    assert digest(torch.zeros(8)[::2]) == base


def test_what_is_too_large_or_too_much_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    found, beyond = held_tensors(
        Roots(None, {}, [("large", torch.zeros(30)), ("small", torch.zeros(20)), ("n", torch.zeros(1))])
    )
    assert (sorted(found), beyond) == (["n", "small"], ["large"])
    monkeypatch.setattr(module, "MOST", 2)
    found, beyond = held_tensors(Roots(None, {}, [("a", torch.zeros(1)), ("list", [torch.zeros(1), torch.ones(1)])]))
    assert beyond == ["list"]
    assert "list" not in found
