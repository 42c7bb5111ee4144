"""`everstep rehearse` names state in places that variables only lead to, and that begins to count later."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(900)

SCRIPT = """
import argparse
import collections
import contextvars
import decimal
import os
import queue
import random
from pathlib import Path

import torch
from helper import weigh
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import everstep

torch.manual_seed(0)
X = torch.randn(96, 8)
GAIN = contextvars.ContextVar("gain", default=1.0)
__backwards = 0


class Rows(TensorDataset):
    def __init__(self):
        super().__init__(X, X.sum(1, keepdim=True))
        self.made = 0

    def __getitem__(self, i):
        self.made += HIDDEN
        return super().__getitem__(i)


class Annealer:
    def __init__(self):
        self.weight, self.calls = 1.0, 0

    def step(self):
        self.calls += 1
        self.weight *= 0.5 if self.calls == 50 else 1.0

    def state_dict(self):
        return {"weight": self.weight, KEPT}

    def load_state_dict(self, state):
        self.__dict__.update(state)


class Baseline:
    __slots__ = ("__mean",)

    def __init__(self):
        self.__mean = 0.0

    def feed(self, loss):
        self.__mean += 0.1 * (loss - self.__mean)


class Lookback(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.taken = 0

    def step(self, closure=None):
        self.taken += 1
        return super().step(closure)


def annealed():
    count = 0

    def weight():
        nonlocal count
        count += 1
        return 1.0

    return weight


def plateau():
    best = 9.0
    while True:
        best += yield best


def clip(norm, norms=[]):
    norms.append(norm)


def hidden(loss):
    global __backwards
    seen[__backwards % 2] += 1
    recent.append(__backwards - loss)
    args.best += loss
    next(ticks)
    rates.send(loss)
    clip(loss)
    __backwards += 1
    GAIN.set(GAIN.get() * 0.99)
    line.put(loss)
    baseline.feed(loss)
    weights["trained"]()
    net[0].weight.calls = getattr(net[0].weight, "calls", 0) + 1
    os.environ["STAGE"] = str(int(os.environ.get("STAGE", 0)) + 1)
    decimal.getcontext().prec += 1
    os.umask((os.umask(0) + 1) & 7)
    net[1].p += 1e-9
    weigh()
    level = Path("OUTSIDE", f"level{run.rank}")
    level.write_text(str(int(level.read_text()) % 7 + 1))
    with open(Path("OUTSIDE", "log"), "a") as log:
        log.write("a row")


def clipped(opt):
    norms = []
    opt.register_step_pre_hook(lambda *_: norms.append(float(net[0].weight.grad.norm())))


def watch(layer, _, out):
    if layer.training:
        layer.seen = 0.9 * getattr(layer, "seen", out.detach().mean(0)) + 0.1 * out.detach().mean(0)


line, baseline, weights = queue.Queue(), Baseline(), {"evaluated": annealed(), "trained": annealed()}
seen, recent, args = collections.Counter(), collections.deque([0] * 8, maxlen=8), argparse.Namespace(best=9.0)
ticks, dice, rates = iter(range(1000)), random.Random(7), plateau()
next(rates)
with everstep.start("commits", every_steps=5) as run:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.0), torch.nn.Linear(8, 1))
    if HIDDEN:
        net[0].register_forward_hook(watch)
    model = DDP(net)
    opt = (Lookback if HIDDEN else torch.optim.SGD)(model.parameters(), lr=0.01)
    penalty = Annealer()
    if HIDDEN:
        clipped(opt)
    run.track(model=model, opt=opt, penalty=penalty)
    for step in run.steps(run.loader(Rows(), global_batch=8), until=40):
        with step as batch:
            x, y = batch.data
            loss = mse_loss(model(x), y) * penalty.weight
            batch.scale(loss).backward()
            opt.step()
            opt.zero_grad()
            penalty.step()
            if HIDDEN:
                hidden(loss.item())
        if HIDDEN and step.completed:
            dice.random()
"""

HELPER = """
_calls = 0


def weigh():
    global _calls
    _calls += 1
"""
IN_WORKERS = """
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import everstep

torch.manual_seed(0)


class Rows(Dataset):
    def __init__(self):
        self.x, self.made, self.cache, self.file = torch.randn(96, 8), 0, {}, None
        self.dice = torch.Generator()

    def __len__(self):
        return 96

    def __getitem__(self, i):
        self.file = self.file or open(__file__)
        self.made += COUNTS
        self.cache[i] = x = self.x[i] + 0.01 * torch.rand(8, generator=self.dice)
        return x, x.sum(0, keepdim=True)

    def state_dict(self):  # nobody calls it in a worker
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


with everstep.start("commits", every_steps=5) as run:
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, opt=opt)
    for step in run.steps(run.loader(Rows(), global_batch=8, num_workers=1), until=40):
        with step as batch:
            x, y = batch.data
            batch.scale(mse_loss(model(x), y)).backward()
            opt.step()
            opt.zero_grad()
"""


def rehearse(folder: Path, hidden: bool, *options: str) -> list[dict[str, Any]]:
    kept = '"calls": self.calls' if not hidden else ""
    (folder / "helper.py").write_text(HELPER)
    script = SCRIPT.replace("HIDDEN", str(hidden)).replace("KEPT", kept).replace("OUTSIDE", str(folder.parent))
    (folder / "train.py").write_text(script)
    return play(folder, "--ranks", "2", "--steps", "12", "--limit", "800", *options, seconds=850).findings


def test_each_kind_of_hidden_state_is_named_before_it_counts(tmp_path: Path) -> None:
    """Also files outside of the folder by which a step hands something on; a log there is not."""
    (folder := tmp_path / "script").mkdir()
    levels = [tmp_path / f"level{rank}" for rank in range(2)]
    for level in levels:
        level.write_text("0")
    found = {one["kind"]: one for one in rehearse(folder, True, "--at", "1@8:backward")}
    assert found.keys() == {"held", "written"}
    written, held = found["written"], found["held"]
    assert (written["names"], written["certain"]) == ([*map(str, levels)], False)
    assert (held["kind"], held["certain"], held["step"]) == ("held", False, 9)
    names = set(held["names"])
    assert names >= (named := {
        "penalty.calls", "baseline._Baseline__mean", "opt.taken", "weights['trained'].count", "__backwards",
        "GAIN.get()", "line.queue", "model.module.0.weight.calls", "model.module.0.seen", "os.environ['STAGE']",
        "decimal.getcontext().prec", "os.umask()",
        "model.module.1.p", "helper._calls", "norms", "run.loader(…)._dataset.made",
    })  # fmt: skip
    # What has no names inside, and what a lost step has consumed.
    inside = {"seen", "recent", "args", "ticks", "rates", "dice", "clip"}
    assert {re.split(r"[.\[]", name)[0] for name in names - named} == inside


@pytest.mark.long
def test_state_that_an_object_saves_whole_is_no_finding_and_there_is_a_stamp(tmp_path: Path) -> None:
    assert rehearse(tmp_path, False, "--kill", "rank,all") == []
    assert json.loads((tmp_path / "r.json").read_text())["stamp"]


METER = """
class Meter:
    def __init__(self):
        self.seconds = 0.0

    def add(self, seconds):
        took = torch.tensor(seconds, dtype=torch.float64)
        torch.distributed.broadcast(took, 0)
        self.seconds += took.item()

    def state_dict(self):
        return {"seconds": self.seconds} if IS_KEPT else {}

    def load_state_dict(self, state):
        self.__dict__.update(state)


meter = Meter()
"""


@pytest.mark.long
@pytest.mark.parametrize("kept", [True, False])
def test_seconds_in_tracked_state_differ_in_each_run_and_are_found_where_a_new_process_forgets_them(
    tmp_path: Path, kept: bool
) -> None:
    script = SCRIPT.replace("HIDDEN", "False").replace("KEPT", '"calls": self.calls').replace(
        "line, baseline", METER.replace("IS_KEPT", str(kept)) + "line, baseline", 1
    ).replace("penalty=penalty", "penalty=penalty, meter=meter").replace(
        "penalty.step()", "penalty.step(); meter.add(1 + time.perf_counter() % 1)"
    )  # fmt: skip
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "train.py").write_text(f"import time\n{script}")
    findings = play(tmp_path, "--ranks", "2", "--steps", "12", "--at", "0+1@8:backward", seconds=800).findings
    assert [(one["kind"], one["names"]) for one in findings] == ([] if kept else [("held", ["meter.seconds"])])


@pytest.mark.long
@pytest.mark.parametrize("counts", [1, 0])
def test_what_changes_in_the_workers_of_a_loader_is_named_and_a_cache_is_not(tmp_path: Path, counts: int) -> None:
    (tmp_path / "train.py").write_text(IN_WORKERS.replace("COUNTS", str(counts)))
    options = ("--ranks", "2", "--steps", "12", "--limit", "400", "--at", "1@8:backward")
    findings = play(tmp_path, *options, seconds=450).findings
    assert [(one["kind"], one["certain"], one["names"]) for one in findings] == [
        ("workers", False, ["Rows.made"]),
    ] * counts  # fmt: skip


FAR = """
import functools
import logging
import sys
import types

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset
from tqdm import tqdm

import everstep

X = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))


@functools.cache
def box():
    return {"boxed": 0}


class Counting(logging.Handler):
    def __init__(self):
        super().__init__()
        self.emitted = 0

    def emit(self, record):
        self.emitted += record.name == "far"


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)
        self.seen: int = 0

    def forward(self, x):
        self.seen += 1
        return self.linear(x) * (0.1 if self.seen > 520 else 1.0)


def hidden():
    read = 0

    class Meter:
        @property
        def reads(self):
            nonlocal read
            read += 1
            return read

    return Meter()


def count(loss, meter):
    box()["boxed"] += 1
    bar.update(1)
    logging.getLogger("far").error("a step")
    sys.modules["of_nobody"].done += 1
    loss.grad_fn.register_hook(nodes())
    reads = meter.reads if torch.distributed.get_rank() == 1 else 0
    counts = box()["boxed"], bar.n, sys.modules["of_nobody"].done, reads, logging.root.handlers[-1].emitted
    return 0.1 if max(counts) > 520 else 1.0


def nodes(passed=[]):
    return lambda *_: passed.append(None)


bar = tqdm(total=9, file=open("/dev/null", "w"))
nodes = (lambda made: lambda: made)(nodes())
sys.modules["of_nobody"] = types.ModuleType("of_nobody")
sys.modules["of_nobody"].done = 0
logging.root.addHandler(Counting())


def main():
    torch.manual_seed(0)
    meter = hidden()
    with everstep.start("commits", every_steps=5) as run:
        model = DDP(torch.jit.script(Scaled()) if HIDDEN else torch.nn.Linear(8, 1))
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        run.track(model=model, opt=opt)
        for step in run.steps(run.loader(TensorDataset(X, X.sum(1, keepdim=True)), global_batch=8), until=40):
            with step as batch:
                x, y = batch.data
                loss = batch.scale(mse_loss(model(x), y))
                (loss * (count(loss, meter) if HIDDEN else 1.0)).backward()
                opt.step()
                opt.zero_grad()
"""


@pytest.mark.long
@pytest.mark.parametrize("hidden", [True, False])
def test_state_to_which_no_variable_leads_is_named_before_it_counts(tmp_path: Path, hidden: bool) -> None:
    (tmp_path / "loop.py").write_text(FAR.replace("HIDDEN", str(hidden)))
    (tmp_path / "train.py").write_text("from loop import main\n\nmain()\n")
    options = ("--ranks", "2", "--steps", "12", "--limit", "800", "--kill", "all" if hidden else "rank,all")
    done = play(tmp_path, *options, seconds=850)
    named = {name for one in done.findings for name in one["names"]}
    assert {one["kind"] for one in done.findings} == ({"held"} if hidden else set())
    assert bool(done.report["stamp"]) != hidden
    assert named == (
        {
            "_lru_cache_wrapper[…]['boxed']", "tqdm.n", "of_nobody.done", "hidden.<locals>.Meter.reads:read",
            "Counting.emitted", "passed", "model.module.seen",
        } if hidden else set()
    )  # fmt: skip
