"""What whole scripts carry from step to step in ways that are easily overlooked; and caches, which carry nothing."""

from __future__ import annotations

import re
import runpy
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everstep.recovery.errors import LoopError
from everstep.train.guards.script_text.loop_check import UNREAD

BEFORE = """
import collections, functools, itertools
import torch
import everstep

torch.manual_seed(0)
drop = torch.nn.Dropout(0.1)
model = torch.nn.Sequential(torch.nn.Linear(2, 4), drop, torch.nn.Linear(4, 1))
teacher = torch.nn.Linear(2, 1).eval().requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.utils.data.TensorDataset(torch.randn(16, 2), torch.arange(16))
n, TRACKED = 0, {{}}

def work(batch, weight=1.0):
    (model(batch.data[0]).pow(2).mean() * weight).backward()
    optimizer.step()
    optimizer.zero_grad()

{before}

with everstep.start(URL) as run:
    run.track(model=model, optimizer=optimizer, **TRACKED)
    for step in run.steps(run.loader(x, global_batch=4), until=5):
        with step as batch:
{body}
"""
HELPERS = """
calls = 0

def work(model, batch, weight=1.0, **options):
    (model(batch.data[0]).pow(2).mean() * weight / options.get("divided", 1.0)).backward()

def weight():
    global calls
    calls += 1
    return 1.0 / calls

class Weighted:
    def __init__(self):
        self.mean = 1.0

    def __call__(self, loss):
        self.mean = 0.9 * self.mean + 0.1
        return loss * self.mean

def log(step, **values):
    print(step, values)

import torch

class Told(torch.nn.Linear):
    def note(self, loss):
        return loss.item()
"""


@dataclass(frozen=True)
class Carrying:
    """Of carried_scripts.txt: what stands before the loop, the step's work, and what a refusal says."""

    name: str
    before: str
    body: str
    told: str


def scripts(group: str) -> list[Any]:
    text = (Path(__file__).parent / "carried_scripts.txt").read_text()
    found = list[Any]()
    for section in text.split("=== ")[1:]:
        title, _, rest = section.partition("\n")
        told = re.match(r"told: (.*)\n", rest)
        before, _, body = rest.removeprefix(told[0] if told else "").partition("---\n")
        of, _, name = title.partition(": ")
        if of == group:
            found.append(pytest.param(Carrying(name, before, body, told[1] if told else ""), id=name))
    return found


def play(folder: Path, carrying: Carrying) -> dict[str, Any]:
    """Run it as a script that saves, with a file of helpers beside it."""
    (folder / "carrying_helpers.py").write_text(HELPERS)
    script = folder / "train.py"
    script.write_text(BEFORE.format(before=carrying.before, body=textwrap.indent(carrying.body.rstrip(), " " * 12)))
    sys.modules.pop("carrying_helpers", None)
    sys.path.insert(0, str(folder))
    try:
        return runpy.run_path(str(script), {"URL": str(folder / "commits")}, "__main__")
    finally:
        sys.path.remove(str(folder))


TIMM = """
class Scheduler:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, epoch):
        pass

    def step_update(self, num_updates):
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / num_updates
"""


@pytest.fixture(autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that has a schedule as timm's are: none of torch's, and its text is not read."""
    folder = tmp_path_factory.mktemp("installed") / "site-packages"
    folder.mkdir()
    (folder / "everstep_test_timm.py").write_text(TIMM)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "everstep_test_timm", raising=False)


@pytest.fixture(autouse=True)
def reader(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """It gives up where it meets what nobody has thought of: none of these may be that."""
    yield
    unread = [r for when in ("setup", "call") for r in caplog.get_records(when) if UNREAD in r.message]
    assert not unread, caplog.text


@pytest.mark.parametrize("script", scripts("lost"))
def test_state_of_a_script_that_reaches_training_is_refused_with_the_line_to_write(
    script: Carrying, tmp_path: Path
) -> None:
    with pytest.raises(LoopError, match=script.told):
        play(tmp_path, script)


@pytest.mark.turns(3)
@pytest.mark.parametrize("script", scripts("right"))
def test_script_that_carries_nothing_is_let_through(script: Carrying, tmp_path: Path) -> None:
    found = play(tmp_path, script)
    assert found["run"].step == 5
