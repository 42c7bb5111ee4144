"""`hvd.elastic` in a world that does not change: what is kept, what is restored, and what is refused by name."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep_horovod.torch as hvd
from everstep.contract import refusal
from everstep.contract.library_files import is_library
from everstep.recovery.errors import LoopError
from everstep.train.guards.sources import loaded_files
from everstep_horovod import optimizer, training
from everstep_horovod import sampler as sampling
from everstep_horovod.errors import INSTEAD, HorovodInternalError
from everstep_horovod.script import names_elastic
from everstep_horovod.snapshot import Snapshot
from everstep_horovod.world import current
from support.compat.ranks import on_ranks


def test_the_interface_is_no_file_of_the_script_where_it_is_installed_from_a_checkout() -> None:
    assert not [file for file in loaded_files() if "everstep_horovod" in file]
    assert is_library(training.__file__)
    lost = HorovodInternalError("a peer was lost")
    lost.__context__ = LoopError("what was refused before")
    assert refusal.find(lost) is None, "an error of our own says by itself why it was raised"


@pytest.mark.parametrize(
    ("text", "elastic"),
    [
        ("import horovod.torch as hvd\n@hvd.elastic.run\ndef train(state): ...", True),
        ("from horovod.torch.elastic import run", True),
        ("from horovod.torch import elastic as e", True),
        ("import horovod.torch.elastic", True),
        ("from everstep_horovod.torch import elastic as e", True),
        ("import everstep_horovod.torch.elastic", True),
        ("import everstep_horovod.torch as hvd", False),
        ("import horovod.torch as hvd\nhvd.init()  # not hvd.elastic.run", False),
        ("import elastic\nfrom elastic.horovodless import run", False),
        ("not python", False),
    ],
)
def test_the_text_of_a_script_says_whether_it_is_elastic(text: str, elastic: bool) -> None:
    assert names_elastic(text) is elastic


@pytest.mark.parametrize("name", sorted(INSTEAD.keys() - {"Adasum"}))
def test_a_name_that_is_not_there_is_refused_with_what_to_write(name: str) -> None:
    with pytest.raises(LoopError, match=f"hvd.{name} is not in"):
        getattr(hvd, name)


@pytest.mark.long
def test_a_script_finds_everstep_under_the_name_of_horovod(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, horovod.torch as hvd\nfrom horovod.torch.elastic import run\n"
        "from horovod.common.exceptions import HorovodInternalError\n"
        "assert sys.argv == ['script.py', '--lr', '1'] and __name__ == '__main__', sys.argv\n"
        "try:\n    import horovod.tensorflow\n"
        "except ModuleNotFoundError as e:\n    print(e, hvd.HorovodInternalError is HorovodInternalError)\n"
    )
    command = [sys.executable, "-m", "everstep_horovod", "script.py", "--lr", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("horovod.tensorflow: Everstep has Horovod's interface for PyTorch alone")
    assert done.stdout.endswith("True\n")


@pytest.mark.long
def test_a_process_that_multiprocessing_starts_anew_imports_the_script_too(tmp_path: Path) -> None:
    """As DataLoader's workers do with `multiprocessing_context="spawn"`, and with Python 3.14 in any case."""
    (tmp_path / "script.py").write_text(
        "import multiprocessing\nfrom horovod.torch.elastic import run\n"
        "def work():\n    print(run.__module__, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    one = multiprocessing.get_context('spawn').Process(target=work)\n    one.start()\n    one.join()\n"
    )
    command = [sys.executable, "-m", "everstep_horovod", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "everstep_horovod.training\n", done.stderr


class _World:
    """Of a sampler: a place in a world."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def draw_again(self) -> None: ...


def test_a_sampler_gives_each_sample_once_over_worlds_of_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks take two batches of five, then two ranks take the rest of the epoch."""
    order = list(range(100))
    random.Random(7 + 3).shuffle(order)
    seen: list[int] = []

    def world_of(rank: int, size: int) -> hvd.elastic.ElasticSampler:
        monkeypatch.setattr(sampling, "current", lambda: _World(rank, size))
        return hvd.elastic.ElasticSampler(range(100), seed=7)

    told: dict[str, Any] = {}
    for rank in range(3):
        sampler = world_of(rank, 3)
        sampler.set_epoch(3)
        seen += list(sampler)[:10]
        for batch in range(2):
            sampler.record_batch(batch, 5)
        told = sampler.state_dict()
        assert sampler.processed_indices == set(order[:30])
    for rank in range(2):
        sampler = world_of(rank, 2)
        sampler.load_state_dict(told)
        assert len(sampler) == 35
        seen += list(sampler)
    assert sorted(seen) == list(range(100))
    monkeypatch.setattr(sampling, "current", lambda: _World(0, 3))
    with pytest.raises(LoopError, match="of another world"):
        iter(sampler)


def test_a_snapshot_shares_no_memory_and_takes_back_an_optimizers_first_state() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    values = {"list": [1, [2]]}
    state = {"model": model, "optimizer": optimizer, "values": values}

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    first = Snapshot(state)
    weight = model.weight.detach().clone()
    step()
    second = Snapshot(state)
    moved, average = model.weight.detach().clone(), optimizer.state[model.weight]["exp_avg"].clone()
    for _ in range(2):  # what is restored must not be the snapshot's own memory
        step()
        values["list"].append(3)
        second.restore(state)
        assert torch.equal(model.weight, moved)
        assert torch.equal(optimizer.state[model.weight]["exp_avg"], average)
        assert values["list"] == [1, [2]]
    first.restore(state)
    assert torch.equal(model.weight, weight)
    assert not optimizer.state


def trained() -> tuple[list[int], float, int, bool]:
    """Goes back by hand, commits, and ends behind its last commit."""
    hvd.init()
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(float(hvd.rank()))
    state = hvd.elastic.TorchState(model, None, batch=0)
    seen: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> str:
        for _ in range(3):
            state.batch += 1
            with torch.no_grad():
                model.weight.add_(1)
            if state.batch == 2:
                state.restore()
                seen.append(state.batch)
            state.commit()
        state.batch = 10
        return "result"

    assert train(state) == "result"
    with pytest.raises(LoopError, match="called before"):
        train(state)
    return seen, model.weight.item(), state.batch, torch.equal(hvd.allreduce(model.weight), model.weight)


def test_a_state_goes_back_to_its_commit_and_all_ranks_begin_as_rank_0(tmp_path: Path) -> None:
    for seen, weight, batch, same in on_ranks(2, tmp_path, trained):
        assert (seen, weight, batch, same) == ([1, 1], 1.0, 10, True)


def drawn(leaves: bool) -> tuple[list[tuple[int, float]], int, list[float]]:
    """What a function draws that commits before each second batch, and how often it commits. It is called again from
    its second commit, if it leaves in the batch behind it. Then it takes two loops without a commit."""
    hvd.init()
    torch.manual_seed(7)
    model = nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    sampler = hvd.elastic.ElasticSampler(range(6))
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0)
    seen: list[tuple[int, float]] = []
    loops: list[float] = []
    left: list[int] = []
    samples: Any = range(6)

    def learn() -> None:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    @hvd.elastic.run
    def train(state: Any) -> None:
        begun = state.batch
        for number, _ in enumerate(torch.utils.data.DataLoader(samples, sampler=sampler)):
            state.batch = begun + number
            if state.batch % 2 == 0:
                state.commit()
            if leaves and state.batch == 3 and not left:
                left.append(3)
                raise hvd.HostsUpdatedInterrupt
            seen.append((state.batch, torch.rand(1).item()))
            learn()
            sampler.record_batch(number, 1)
        for _ in range(2):
            sampler.set_epoch(sampler.epoch + 1)
            next(iter(sampler))
            loops.append(torch.rand(1).item())
            learn()

    train(state)
    return seen, training._ran[0]._commits._commits, loops


def test_a_commit_before_a_batch_is_not_counted_again_when_the_function_goes_on_from_it(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    ((calm, commits, loops),) = on_ranks(1, tmp_path / "calm", partial(drawn, False))
    ((seen, again, after),) = on_ranks(1, tmp_path, partial(drawn, True))
    assert len(calm) == 6
    assert seen[2] == seen[3], "batch 2 is taken twice, with the same numbers"
    assert seen[:2] + seen[3:] == calm
    assert again == commits == 4
    assert after == loops


def test_loops_between_two_commits_draw_numbers_of_their_own(tmp_path: Path) -> None:
    ((_, _, loops),) = on_ranks(1, tmp_path, partial(drawn, False))
    assert loops[0] != loops[1]


def _state(**more: Any) -> Any:
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return hvd.elastic.TorchState(model, optimizer, **more)


def run_once(state: Any, work: Callable[[Any], None] = lambda state: None) -> None:
    hvd.elastic.run(work)(state)


def without_optimizer() -> None:
    state = _state()
    run_once(hvd.elastic.TorchState(state.model))


def without_module() -> None:
    state = _state()
    run_once(hvd.elastic.TorchState(None, state.optimizer))


def between() -> None:
    def work(state: Any) -> None:
        state.model(torch.ones(1, 2)).sum().backward()
        state.commit()

    run_once(_state(), work)


REFUSED: dict[str, Callable[[], Any]] = {
    "is not in the state": without_optimizer,
    "a module that is not in the state": without_module,
    "Commit behind the step": between,
    "objects with state_dict": lambda: _state(thing=object()),
    "the name is reserved": lambda: _state(seeds=nn.Linear(1, 1)),
    "hvd.elastic.run brings all ranks to one state": lambda: _state().sync(),
    "its first argument is a TorchState": lambda: run_once(3),
    "make the tensor dense": lambda: hvd.allreduce(torch.eye(2).to_sparse()),
    "tensor.unsqueeze(0)": lambda: hvd.allgather(torch.tensor(1.0)),
}


def without_commits() -> list[float]:
    hvd.init()
    sampler = hvd.elastic.ElasticSampler(range(4))
    drawn: list[float] = []

    def work(state: Any) -> None:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            iter(sampler)
            drawn.append(torch.rand(1).item())

    run_once(_state(sampler=sampler), work)
    return drawn


def test_epochs_without_a_commit_draw_their_own_random_numbers(tmp_path: Path) -> None:
    (drawn,) = on_ranks(1, tmp_path, without_commits)
    assert len(set(drawn)) == 3, drawn


def between_passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    hvd.init()
    world = current()
    monkeypatch.setattr(type(world), "wanted", True)  # a new process waits
    seen: list[str] = []

    def work(state: Any) -> None:
        if seen:
            return
        state.model(torch.ones(1, 2)).sum().backward()
        state.check_host_updates()
        seen.append("gradients are kept")
        state.optimizer.step()
        try:
            state.check_host_updates()
        except hvd.HostsUpdatedInterrupt:
            seen.append("the process comes behind the step")
            monkeypatch.setattr(type(world), "wanted", False)
            raise

    run_once(_state(), work)
    return seen


def test_a_new_process_is_taken_in_where_no_gradients_wait_for_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (seen,) = on_ranks(1, tmp_path, lambda: between_passes(monkeypatch))
    assert seen == ["gradients are kept", "the process comes behind the step"]


def test_values_keep_their_classes_when_they_go_back_to_a_commit() -> None:
    seen, places = Counter("aab"), defaultdict(list, {1: ["x"]})
    state = hvd.elastic.TorchState(seen=seen, places=places, batch=3)
    snapshot = Snapshot(state._tracked)
    state.seen.update("ab")
    state.places[2].append("y")
    state.batch = 4
    snapshot.restore(state._tracked)
    state.seen.update("b")
    assert (state.seen, state.batch) == (Counter(a=2, b=2), 3)
    assert state.places[3] == []
    assert state.places == {1: ["x"], 3: []}


def refused() -> dict[str, str]:
    found = {}
    for words, body in REFUSED.items():
        hvd.init()
        training._ran.clear()  # each as in a process of its own
        optimizer._made.clear()
        try:
            body()
            found[words] = "nothing was raised"
        except LoopError as e:
            found[words] = str(e)
    return found


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    (found,) = on_ranks(1, tmp_path, refused)
    for words, said in found.items():
        assert words in said
