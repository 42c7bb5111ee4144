"""`everstep.load` reads a commit and takes nothing: no record, no mark, and nobody's log."""

from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint import CheckpointError, Damaged, NoCommit, StateMismatch
from everstep.storage import MemoryStore


class ReadOnly(MemoryStore):
    """Refuses whatever would change it, once it is shut."""

    shut = False

    def _open(self) -> None:
        if self.shut:
            raise PermissionError("read-only")

    def create(self, name: str, data: Any) -> None:
        self._open()
        super().create(name, data)

    def put(self, name: str, data: Any) -> None:
        self._open()
        super().put(name, data)

    def delete(self, name: str) -> None:
        self._open()
        super().delete(name)

    def start_upload(self, name: str, size_hint: int | None = None) -> Any:
        self._open()
        return super().start_upload(name, size_hint)


def test_nothing_is_written_and_the_run_that_trains_goes_on(runs: Any) -> None:
    store = ReadOnly()
    run, _ = runs(store).begin(every_steps=1)
    run.save(1, runs.state(1)).wait(30)
    run.save(2, runs.state(2)).wait(30)
    runs.settle(run)
    store.shut, before = True, dict(store.objects)
    for _ in range(4):
        into = runs.state()
        loaded = everstep.load(store=store, state=into)
        assert (loaded.step, loaded.state) == (2, into)
        assert (into["step"], set(into["w"].tolist())) == (2, {2.0})
    assert store.objects == before
    store.shut = False
    run.save(3, runs.state(3)).wait(30)
    run.close()
    assert runs(store).restored() == 3


def test_what_the_commit_holds_comes_without_a_state(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    with everstep.Checkpointer(str(tmp_path)) as run:
        state = {"model": model, "optimizer": optimizer, "epoch": 3, "seen": (1, 2)}
        run.restore(state)
        run.save(7, state)
    loaded = everstep.load(str(tmp_path))
    assert loaded.step == 7
    assert (loaded.state["epoch"], loaded.state["seen"]) == (3, (1, 2))
    again = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    again.load_state_dict(loaded.state["model"])
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert loaded.state["optimizer"]["state"][0]["step"] == 1


def test_one_tensor_is_read_without_the_rest(runs: Any) -> None:
    class Counts(MemoryStore):
        read = 0

        def get_into(self, name: str, start: int, *buffers: memoryview) -> None:
            self.read += sum(len(b) for b in buffers)
            super().get_into(name, start, *buffers)

    store = Counts()
    state = {"big": torch.zeros(40_000_000), "model": {"a/b": torch.arange(4.0), "c": 1}}
    run = everstep.Checkpointer(store=store)
    run.restore(state)
    run.save(1, state).wait(60)
    run.close()
    store.read = 0
    assert everstep.load(store=store, only="model/a~1b").state["model/a~1b"].tolist() == [0, 1, 2, 3]
    assert everstep.load(store=store, only=["model"]).state == {"model": {"a/b": pytest.approx([0, 1, 2, 3]), "c": 1}}
    assert store.read < 140e6, "a chunk of 64 MiB each, which is what is checked, and not 160 MB"
    for name in ("modle", "model/x", "big/0"):
        with pytest.raises(StateMismatch, match=f"no key or tensor '{name}'; it has big, model"):
            everstep.load(store=store, only=[name])


def test_tensors_come_where_they_are_asked_for(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1)
    assert everstep.load(store=store, map_location="meta").state["w"].device.type == "meta"


def test_commit_is_chosen_by_step_or_number(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2, 3)
    assert everstep.load(store=store, step=2).state["step"] == 2
    assert everstep.load(store=store, n=1).step == 1
    into = runs.state()
    assert everstep.load(store=store, state=into, step=2).n == 2
    assert into["step"] == 2
    with pytest.raises(NoCommit, match="no commit of step 9; there are steps 3, 2, 1"):
        everstep.load(store=store, step=9)


@pytest.mark.parametrize("filled", [False, True])
def test_damaged_commit_is_stepped_over_unless_it_was_asked_for(filled: bool, runs: Any, caplog: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    shard = max(name for name in store.objects if name.startswith("data/"))
    store.objects[shard] = store.objects[shard][:-1] + b"\xff"
    into = runs.state() if filled else None
    loaded = everstep.load(store=store, state=into)
    assert (loaded.step, loaded.state["step"], set(loaded.state["w"].tolist())) == (1, 1, {1.0})
    assert shard in caplog.text
    with pytest.raises(Damaged, match=shard):
        everstep.load(store=store, state=runs.state() if filled else None, step=2)


def train(run: everstep.Checkpointer, runs: Any, step: int) -> None:
    """Commit a step, and clean up."""
    run.save(step, runs.state(step)).wait(30)
    runs.settle(run)


class Races(MemoryStore):
    trains: Any = None

    def get_into(self, name: str, start: int, *buffers: memoryview) -> None:
        if (trains := self.trains) is not None:
            self.trains = None
            trains()
        super().get_into(name, start, *buffers)


@pytest.mark.parametrize("filled", [False, True])
def test_commit_that_goes_while_it_is_read_is_read_anew(filled: bool, runs: Any) -> None:
    store = Races()
    run, _ = runs(store).begin(keep=1)
    train(run, runs, 1)
    store.trains = lambda: train(run, runs, 2)
    loaded = everstep.load(store=store, state=runs.state() if filled else None)
    assert (loaded.step, set(loaded.state["w"].tolist())) == (2, {2.0})
    run.close()


@pytest.mark.parametrize("filled", [False, True])
def test_older_commit_that_is_pinned_is_not_taken_for_the_newest(filled: bool, runs: Any) -> None:
    store = Races()
    run, _ = runs(store).begin(keep=1)
    run.save(1, runs.state(1)).wait(30)
    run.pin(1)
    train(run, runs, 2)
    store.trains = lambda: train(run, runs, 3)
    assert everstep.load(store=store, state=runs.state() if filled else None).step == 3
    run.close()


def test_nothing_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoCommit, match="there is no commit"):
        everstep.load(str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(CheckpointError, match="give the URL"):
        everstep.load()
    with pytest.raises(CheckpointError, match="only= and map_location="):
        everstep.load(str(tmp_path), {}, only=["a"])


def test_state_that_does_not_fit_is_told_and_no_older_commit_is_taken(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    with pytest.raises(StateMismatch, match="the commit has no 'head'"):
        everstep.load(store=store, state={"head": torch.zeros(1)})


def test_tensors_that_require_a_gradient_are_filled_in_place() -> None:
    def state(number: float) -> dict[str, Any]:
        deep = {
            "list": [torch.full((2,), number, requires_grad=True)],
            "parameter": torch.nn.Parameter(torch.tensor(number)),
        }
        alpha = torch.full((1,), number, requires_grad=True)
        return {"log_alpha": alpha, "bare": torch.nn.Parameter(torch.full((2,), number)), "deep": deep}

    def tensors(of: dict[str, Any]) -> list[torch.Tensor]:
        return [of["log_alpha"], of["bare"], of["deep"]["list"][0], of["deep"]["parameter"]]

    store, into = MemoryStore(), state(0.0)
    with everstep.Checkpointer(store=store) as run:
        run.restore(state(1.0))
        run.save(5, state(1.0))
    ours = tensors(into)
    everstep.load(store=store, state=into)
    assert all(now is then for now, then in zip(tensors(into), ours, strict=True))
    assert all(t.requires_grad and t.is_leaf and bool((t == 1).all()) for t in ours)
    wide = {"log_alpha": torch.zeros(1, dtype=torch.float64, requires_grad=True)}
    everstep.load(store=store, state=wide, cast=True)
    assert wide["log_alpha"].tolist() == [1]
    assert wide["log_alpha"].requires_grad
