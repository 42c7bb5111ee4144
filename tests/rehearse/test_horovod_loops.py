"""`everstep rehearse` on scripts with Horovod's interface, with real kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.installing import remedy
from support import TESTS
from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(900)

SHORT = ("--ranks", "2", "--steps", "12")
SCRIPT = """
import horovod.torch as hvd
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

hvd.init()
torch.manual_seed(0)
x = torch.randn(240, 8)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
sampler = hvd.elastic.ElasticSampler(dataset)
loader = DataLoader(dataset, batch_size=12 // hvd.size(), sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
warm = 0


@hvd.elastic.run
def train(state):
    global warm
    for state.epoch in range(state.epoch, 100):
        for data, target in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(data), target)
            (loss * (2.0 if COUNT > 7 else 1.0)).backward()
            optimizer.step()
            sampler.record_batch(0, 12 // hvd.size())
            warm += 1
            state.batch += 1
            if state.batch % BATCHES == 0:
                state.commit()
        sampler.set_epoch(state.epoch + 1)


train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0))
open("done", "w").close()
"""
RIGHT = SCRIPT.replace("COUNT", "state.batch").replace("warm += 1", "pass")


def rehearse(folder: Path, script: str, *options: str, **environ: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the report. `environ`: variables that interpreters read."""
    (folder / "train.py").write_text(script)
    done = play(folder, *options, seconds=850, environ=environ, cold=bool(environ))
    return done.code, done.report


def ended(report: dict[str, Any]) -> list[tuple[str, int, int, bool]]:
    """Of each run: its name, its steps, how many processes were killed, and whether it came to the script's end."""
    return [(run["name"], run["steps"], run["killed"], "done" in run["files"]) for run in report["runs"]]


CALM = [("calm", 12, 0, True), ("again", 12, 0, True)]


@pytest.mark.long
def test_counter_that_the_state_has_not_is_found_with_its_name_and_its_step(tmp_path: Path) -> None:
    """The new process counts from 0, and the other counts the batch twice that it has taken again."""
    script = SCRIPT.replace("COUNT", "warm").replace("BATCHES", "1")
    code, report = rehearse(tmp_path, script, *SHORT, "--at", "1@5:backward")
    (found,) = [f for f in report["findings"] if f["certain"]]
    assert (found["kind"], found["step"], code) == ("tracked", 9, 1)
    assert {"warm", "model", "optimizer"} <= set(found["names"])
    assert "hvd.elastic.TorchState" in found["text"]
    assert ended(report) == [*CALM, ("at", 12, 1, True)]


@pytest.mark.long
@pytest.mark.parametrize("batches", ["1", "3"])
def test_elastic_script_that_is_right_is_passed_after_each_loss(tmp_path: Path, batches: str) -> None:
    code, report = rehearse(tmp_path, RIGHT.replace("BATCHES", batches), *SHORT)
    assert (report["findings"], code) == ([], 0)
    assert ended(report) == [
        *CALM, ("rank", 12, 5, True), ("all", 12, 2, True), ("more", 12, 2, True), ("fewer", 12, 2, True),
    ]  # fmt: skip


@pytest.mark.long
def test_points_of_a_step_and_of_its_commit_are_all_reached(tmp_path: Path) -> None:
    lost = "1@1:begin,1@2:backward,0@4:gradients,1@5:optimizer,0@7:tail,1@8:between"
    code, report = rehearse(tmp_path, RIGHT.replace("BATCHES", "1"), *SHORT, "--at", lost)
    assert (report["findings"], ended(report), code) == ([], [*CALM, ("at", 12, 6, True)], 0)


@pytest.mark.long
def test_value_of_the_state_that_is_wrong_is_told_by_its_name(tmp_path: Path) -> None:
    """A value that the function sets when it is called is no longer that of the commit."""
    script = RIGHT.replace("BATCHES", "1").replace("    global warm\n", "    global warm\n    state.batch = 0\n")
    code, report = rehearse(tmp_path, script, *SHORT, "--at", "1@9:backward")
    (found,) = [f for f in report["findings"] if f["certain"]]
    assert (found["kind"], code) == ("tracked", 1)
    assert "state.batch" in found["names"]


@pytest.mark.long
def test_example_for_horovod_is_passed(tmp_path: Path) -> None:
    code, report = rehearse(tmp_path, (TESTS.parent / "examples" / "horovod" / "train.py").read_text())
    assert [f for f in report["findings"] if f["certain"]] == []
    assert {f["kind"] for f in report["findings"]} == {"size"}, "a batch of each rank's own grows with their number"
    assert [(run["steps"], run["killed"]) for run in report["runs"]] == [
        (40, 0), (40, 0), (40, 5), (40, 3), (40, 3), (40, 3),
    ]  # fmt: skip
    assert code == 0


PLAIN = """
import horovod.torch as hvd
import torch
from torch.nn.functional import mse_loss

import everstep

hvd.init()
torch.manual_seed(0)
x = torch.randn(240, 8)
model = torch.nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
SETUP
for step in range(start, 1000):
    order = torch.randperm(240, generator=torch.Generator().manual_seed(step))[:12]
    mine = order[hvd.rank() :: hvd.size()]
    optimizer.zero_grad()
    mse_loss(model(x[mine]), x[mine].sum(1, keepdim=True)).backward()
    optimizer.step()
    SAVE
"""


@pytest.mark.long
def test_script_that_is_not_elastic_is_rehearsed_with_a_checkpointer(tmp_path: Path) -> None:
    setup = (
        'state = {"model": model, "optimizer": optimizer}\ncheckpointer = everstep.Checkpointer("commits")\n'
        "start = checkpointer.restore(state) or 0"
    )
    save = "if checkpointer.should_save(step + 1):\n        checkpointer.save(step + 1, state)"
    code, report = rehearse(tmp_path, PLAIN.replace("SETUP", setup).replace("SAVE", save), *SHORT)
    assert (report["findings"], code) == ([], 0)
    assert [(run["steps"], run["killed"]) for run in report["runs"]] == [(12, 0), (12, 0), (12, 5), *[(12, 2)] * 3]


@pytest.mark.long
def test_script_that_is_not_elastic_and_saves_by_itself_is_told_what_to_write(tmp_path: Path) -> None:
    code, report = rehearse(tmp_path, PLAIN.replace("SETUP", "start = 0").replace("SAVE", "pass"), *SHORT)
    (found,) = report["findings"]
    assert (found["kind"], len(report["runs"]), code) == ("ended", 1, 1)
    assert "hvd.elastic.TorchState" in found["text"]


@pytest.mark.long
def test_missing_distribution_is_named(tmp_path: Path) -> None:
    hidden = "import sys\nsys.modules['everstep_horovod'] = None\n"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(hidden)
    code, report = rehearse(tmp_path, RIGHT.replace("BATCHES", "1"), *SHORT, PYTHONPATH=str(tmp_path / "site"))
    (found,) = report["findings"]
    assert (found["kind"], code) == ("ended", 1)
    assert remedy("everstep-horovod") in found["text"]
