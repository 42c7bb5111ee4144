"""The tables of docs/reference/session.md about the numbers of the loop and about the world are true of real ranks, of
which one is killed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.ordinary.ordinary_play import SIZE, under_one_agent

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import everstep


def answer(ask):
    try:
        return ask()
    except everstep.LoopError:
        return "refused"


def world():
    group = answer(dist.get_world_size), answer(lambda: dist.group.WORLD.size())
    ranks = answer(lambda: run.rank), answer(dist.get_rank), int(os.environ["RANK"])
    local = int(os.environ["LOCAL_RANK"]), str(run.device)
    found = {"ranks": ranks, "most": run.world_size, "group": group, "local": local}
    return found | {"size": int(os.environ["WORLD_SIZE"])}


torch.manual_seed(0)
x = torch.randn(60, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
steps = []
with everstep.start("commits", every_steps=100) as run:
    before = world() | {"collective": answer(lambda: dist.all_reduce(torch.ones(1)))}
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for i, step in enumerate(run.steps(run.loader(dataset, global_batch=12), epochs=2)):
        with step as batch:
            data, target = batch.data
            batch.scale(torch.nn.functional.mse_loss(model(data), target)).backward()
            optimizer.step()
            optimizer.zero_grad()
            here = step.number, run.step, batch.epoch, batch.step, batch.micro, batch.micros
            inside = world()
        if step.completed:
            steps.append((i, here, step.number, run.step))
with open(f"{os.getpid()}.json", "w") as file:
    json.dump({"before": before, "inside": inside, "steps": steps}, file)
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has written, by its rank in the last step; rank 1 was killed in step 3."""
    folder = tmp_path_factory.mktemp("contract")
    (folder / "train.py").write_text(SCRIPT)
    ended = under_one_agent(folder, folder / "train.py", "3:backward")
    assert (ended.codes, ended.killed) == ((0,) * SIZE, True), ended.log[-3000:]
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(found, key=lambda one: int(one["inside"]["ranks"][0]))


def test_numbers_of_the_loop_count_steps_of_the_run_and_not_of_a_process(played: list[dict[str, Any]]) -> None:
    whole = [[n, [n, n, n // 5, n % 5, 0, 1], n, n + 1] for n in range(10)]
    repeated = [[n + (n >= 3), *rest] for n, *rest in whole]  # `enumerate` counts the step in which a rank was lost
    assert [played[0]["steps"], played[2]["steps"]] == [repeated, repeated]
    new = played[1]["steps"]
    assert [rest for _, *rest in new] == [rest for _, *rest in whole[3:]]
    assert new[0][0] < 3, "it counts from 0"
    assert new[-1][0] > len(new) - 1, "and the steps that it only compares"


def test_world_before_the_loop_and_in_it(played: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(played):
        before, inside = one["before"], one["inside"]
        assert before["ranks"] == ["refused", "refused", rank]  # of a new process too: those of its place
        assert (before["most"], before["size"]) == (SIZE, SIZE)
        assert (before["group"], before["collective"]) == (["refused", "refused"], "refused")
        assert inside["ranks"] == [rank] * 3
        assert (inside["most"], inside["size"], inside["group"]) == (SIZE, SIZE, [SIZE, SIZE])
        assert before["local"] == inside["local"] == [rank, "cpu"]
