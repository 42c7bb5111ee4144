"""The page of the session, docs/reference/session.md, is short and names the whole API. Each Python block of it and of
its pages of details runs as it is written, but for smaller numbers and another folder; and each puts on the run's
device what has to be there."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.data import Batch, ElasticLoader
from everstep.train.step import Step
from support.ordinary.ordinary_rows import ROWS, SCRIPTS
from support.processes.warm_python import warm

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
PAGE = REFERENCE / "session.md"
PAGES = [PAGE, *sorted(REFERENCE.glob("session-*.md"))]
MOST_WORDS = 2500
AROUND = """
import os, sys
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
    os.environ[name] = value
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import everstep, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss as criterion
from torch.nn.parallel import DistributedDataParallel

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

done = []
def download(): done.append("download")
def new_name(): return "name"
def score(model, rank, world_size): return 1.0
def shapes(place, rows): return torch.empty(rows, 4), torch.empty(rows, 1, requires_grad=True)
x = torch.randn(64, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
"""
CHANGES = {
    "s3://bucket/run": "commits", "until=10_000": "until=4", "until=1_000": "until=4",
    "global_batch=512": "global_batch=8", "every=500": "every=2", "shard=8": "shard=1",
    "tensor=8": "tensor=1", "model=8": "model=1", "subgroups(8)": "subgroups(1)",
    "512 * 8 // run.world_size // 16": "8 // run.world_size // 2", "place, 8": "place, 1", "place == 7": "place == 0",
    "Schedule1F1B(stage, 16": "Schedule1F1B(stage, 2",
}  # fmt: skip


# Public in the code, and of no use to a script.
INSIDE: dict[type, set[str]] = {everstep.Run: {"forked"}, Step: {"scale"}, Batch: {"keys", "weighing"}}


def blocks() -> list[str]:
    found = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
    for said, here in CHANGES.items():
        assert any(said in block for block in found), said
        found = [block.replace(said, here) for block in found]
    return found


def test_contract_is_short_and_begins_with_its_sentence() -> None:
    text = PAGE.read_text()
    assert len(text.split()) <= MOST_WORDS
    assert text.split("\n\n")[1] == "*What is tracked survives. Everything else begins anew in a new process.*"


# By the beginning of a row of the table "What the loop carries": the scripts that are written as it says and are played
# with kills (`tests/ordinary`), and what both have in common.
CARRIED: dict[str, dict[str, list[str]]] = {
    "a list or dictionary": {"options_counted_advised": []},
    "a number, text or flag": {"first_loss_tracked": ["carried = {"]},
    "an attribute, ": {"warmup_object_advised": ['warmup.carried = {"taken": warmup.taken}', 'self.carried["taken"]']},
    "a `deque` or a `set`": {
        "recent_losses_advised": ['del carried["recent"][:-3]'],
        "lengths_seen_advised": ['carried = {"seen": dict.fromkeys(seen)}'],
    },
    "`itertools.count()`": {"rate_by_iterator_advised": ['carried["taken"] += 1']},
    "another iterator": {"weight_by_generator_advised": ["itertools.islice(weights, "]},
    "a default of a parameter": {"default_list_advised": []},
    "a module's attribute": {"dropout_decays_advised": ['now = {"p": drop.p}', 'drop.p = now["p"]']},
    "a number or flag of a module": {"queue_in_buffer": ["self.register_buffer("]},
    "an attribute of the dataset": {
        "dataset_changed_advised": ['self.carried = {"scale": 1.0}', "dataset_carried=dataset.carried"]
    },
    "the index of `enumerate": {"dropout_by_step": ["step.number"]},
    "a rank or a world size": {"functional": ["run.world_size"]},
}


def test_each_row_of_what_the_loop_carries_is_a_script_that_is_played() -> None:
    _, _, text = (REFERENCE / "session-tracking.md").read_text().partition("| what is carried |")
    rows = text.split("\n\n")[0].splitlines()[2:]
    assert len(rows) == len(CARRIED)
    played = {row.script for row in ROWS if not row.refused}
    for row, (beginning, scripts) in zip(rows, CARRIED.items(), strict=True):
        assert row.startswith(f"| {beginning}")
        assert scripts.keys() <= played
        for script, lines in scripts.items():
            text = (SCRIPTS / f"{script}.py").read_text()
            assert [line for line in lines if line not in row or line not in text] == []


@pytest.mark.parametrize("kind", [everstep.Run, Step, Batch])
def test_contract_names_whatever_is_public(kind: type) -> None:
    shown = PAGE.read_text()
    names = {name for name in dir(kind) if not name.startswith("_")} | set(getattr(kind, "__slots__", ()))
    prefix = {everstep.Run: "run", Step: "step", Batch: "batch"}[kind]
    assert [name for name in sorted(names - INSIDE[kind]) if f"`{prefix}.{name}" not in shown] == []


@pytest.mark.parametrize("call", [everstep.start, everstep.Run.steps, everstep.Run.loader, everstep.Run.train])
def test_contract_shows_the_arguments_of_a_call(call: Callable[..., object]) -> None:
    (shown,) = re.findall(rf"`(?:run\.)?{call.__name__}\((.*?)\)[^`]*` \| ", PAGE.read_text())
    signature = inspect.signature(call)
    taken = [one.replace(annotation=one.empty) for name, one in signature.parameters.items() if name != "self"]
    code = str(signature.replace(parameters=taken, return_annotation=signature.empty))[1:-1].split(", ")
    assert [one for one in shown.split(", ") if one in code] == code


@pytest.mark.long_but("5")
@pytest.mark.parametrize("number", range(7))
@pytest.mark.timeout(240)
def test_a_block_of_the_page_runs_as_it_is_written(number: int, tmp_path: Path) -> None:
    found = blocks()
    assert len(found) == 7
    (tmp_path / "train.py").write_text(AROUND + found[number] + "\nprint('steps', run.step)\n")
    ended = warm().run("train.py", cwd=tmp_path, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert "steps 4" in ended.stdout


class Counted(contextlib.nullcontext[Any]):
    """A step that counts."""

    completed = True


class OnADevice:
    """A run whose device is `meta`: as on an accelerator, what is left on the CPU does not compute with what is there.
    Its steps are real batches; nothing is saved, and nobody else is there."""

    device, rank, world_size, step = torch.device("meta"), 0, 1, 0

    def __enter__(self) -> OnADevice:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def loader(self, dataset: Any, **options: Any) -> ElasticLoader:
        return ElasticLoader(dataset, rank=0, world_size=1, **options)

    def steps(self, loader: ElasticLoader, until: int) -> Iterator[Any]:
        for batch in itertools.islice(loader, until):
            yield Counted(batch)
            self.step += 1

    def train(self, learn: Callable[[Any], object], loader: ElasticLoader, until: int) -> None:
        for step in self.steps(loader, until):
            with step as batch:
                learn(batch)

    def evaluate(self, function: Callable[[], object], every: int) -> None:
        function()

    def once(self, function: Callable[[], object], each: str = "") -> object:
        return function()

    def track(self, **objects: Any) -> None:
        """Optimizers are among them, so what they step is where it should be."""
        for optimizer in (o for o in objects.values() if isinstance(o, torch.optim.Optimizer)):
            assert all(p.device.type == "meta" for group in optimizer.param_groups for p in group["params"])

    def mesh(self, **sizes: int) -> dict[str, None]:
        return dict.fromkeys(("replicate", *sizes))

    def pipeline(self, make: Callable[[], Any]) -> Any:
        return make()

    def scale(self, loss: Any) -> Any:
        return loss

    def log(self, **values: object) -> None:
        pass

    def average_gradients(self, module: torch.nn.Module) -> None:
        pass


class OneStage:
    """A schedule of one stage and one micro-batch."""

    def __init__(self, stage: torch.nn.Module, _: int, loss_fn: Callable[[Any, Any], Any]) -> None:
        self._stage, self._loss_fn = stage, loss_fn

    def step(self, x: torch.Tensor, target: torch.Tensor) -> None:
        self._loss_fn(self._stage(x), target).backward()


def on_a_device(block: str, monkeypatch: pytest.MonkeyPatch) -> OnADevice:
    """Run a block there."""
    run = OnADevice()
    monkeypatch.setattr(everstep, "start", lambda *_, **__: run)
    monkeypatch.setattr(torch.Tensor, "item", lambda _: 1.0)  # a number of such a tensor is not known
    names: dict[str, Any] = {}
    around = AROUND.replace("os.environ[name] = value", "pass")
    exec(around, names)
    names["DistributedDataParallel"] = lambda module: module
    names["fully_shard"] = names["parallelize_module"] = lambda *_, **__: None
    names["PipelineStage"] = lambda module, *_, **shapes: module
    names["Schedule1F1B"] = OneStage
    names["dist"] = types.SimpleNamespace(
        all_reduce=lambda *_, **__: None, new_subgroups=lambda _: (None, []), get_rank=lambda _: 0
    )
    exec(block, names)
    return run


@pytest.mark.parametrize("number", range(7))
def test_a_block_of_the_page_runs_where_tensors_are_on_another_device(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_a_device(blocks()[number], monkeypatch).step == 4


@pytest.mark.parametrize("left_out", [r"(?<=\))\.to\(run\.device\)", r"(?<=batch)\.to\(run\.device\)"])
@pytest.mark.parametrize("number", range(7))
def test_a_block_that_left_something_on_the_cpu_would_fail_there(
    number: int, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = blocks()[number]
    block, count = re.subn(left_out, "", block)
    assert count == 1
    with pytest.raises((RuntimeError, AssertionError)):
        on_a_device(block, monkeypatch)
