"""What callbacks and modules of a script's own classes keep in their attributes goes with the state of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep.checkpoint import Checkpointer
from everstep.train.adapters.script_state import ScriptAttributes


class Patience:
    def __init__(self, rank: int) -> None:
        self.rank, self.waited, self.best, self.seen = rank, 0, float("inf"), [0.0]
        self.table: dict[str, Any] = {}
        self.model = object()

    def hear(self, loss: float) -> None:
        self.alternates = not getattr(self, "alternates", False)
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(self.best, loss)
        self.seen.append(loss)
        self.table["last"] = {"loss": loss}
        self.heard = True


def held(patience: Patience) -> dict[str, Any]:
    return {name: value for name, value in vars(patience).items() if name not in ("rank", "model")}


def test_what_has_changed_is_put_back_here_and_in_a_process_that_comes_later() -> None:
    old, new = Patience(0), Patience(1)
    ours, theirs = ScriptAttributes([old]), ScriptAttributes([new])
    old.hear(0.5)
    told = json.loads(json.dumps(ours.now()))
    then = json.loads(json.dumps(held(old)))
    seen = old.seen
    old.hear(0.7)
    ours.now()
    ours.put_back(told)
    theirs.put_back(told)
    assert held(old) == then
    assert held(new) == {n: v for n, v in then.items() if n not in ("heard", "alternates")}
    assert old.seen is seen, "others may hold the list"
    assert new.rank == 1, "what has not changed is each process's own"


def test_a_first_step_that_is_repeated_begins_with_what_was_before_it() -> None:
    patience = Patience(0)
    attributes = ScriptAttributes([patience])
    before = json.loads(json.dumps(held(patience)))
    patience.hear(0.5)
    attributes.now()
    attributes.put_back({})
    assert held(patience) == before


def test_a_flag_that_was_set_once_is_each_processs_own_and_one_that_alternates_is_not() -> None:
    old, new = Patience(0), Patience(1)
    ours, theirs = ScriptAttributes([old]), ScriptAttributes([new])
    for _ in range(3):
        old.hear(0.5)
        told = ours.now()
    theirs.put_back(json.loads(json.dumps(told)))
    assert new.alternates == old.alternates
    assert not hasattr(new, "heard"), "as a log that the old process has opened"
    old.hear(0.4)
    ours.now()
    ours.put_back(told)
    assert held(old) == {**held(new), "heard": True}
    new.hear(0.4), old.hear(0.4)
    assert held(old) == held(new)
    assert theirs.now() == ours.now(), "and a process that comes after that one is told the same"


class Meter:
    """Keeps a mean by a count and a tensor, as a callback's own loss scale or baseline may."""

    def __init__(self, size: int = 3) -> None:
        self.size, self.count, self.mean = size, 0, torch.zeros(size)
        self.spread: Any = np.float32(0)
        self.bins = np.zeros(4)

    def hear(self, value: float) -> None:
        self.count += 1
        self.mean = self.mean + (value - self.mean) / self.count
        self.spread = np.maximum(self.spread, np.float32(value))
        self.bins[self.count % 4] += 1


def heard(meter: Meter) -> dict[str, Any]:
    return {**vars(meter), "mean": meter.mean.tolist(), "bins": meter.bins.tolist(), "kind": type(meter.spread)}


def test_tensor_and_arrays_beside_a_count_are_kept_with_it() -> None:
    old, new = Meter(), Meter()
    ours, theirs = ScriptAttributes([old]), ScriptAttributes([new])
    for value in (1.0, 4.0):
        old.hear(value)
        told = ours.now()
    then = heard(old)
    old.hear(9.0)
    ours.now()
    ours.put_back(told)
    theirs.put_back(told)
    assert heard(old) == heard(new) == then
    for meter in (old, new):
        meter.hear(2.0)
    assert heard(old) == heard(new)
    ours.put_back(told)
    assert heard(old) == then, "what is told is no part of the object"


def test_tensor_that_is_changed_in_its_place_is_kept() -> None:
    old, new = Meter(), Meter()
    ours, theirs = ScriptAttributes([old]), ScriptAttributes([new])
    old.mean.add_(2.0)
    held = new.mean
    theirs.put_back(ours.now())
    assert new.mean is held, "others may hold the tensor"
    assert new.mean.tolist() == [2.0] * 3


@pytest.mark.parametrize("way", ["inference", "data", "numpy"])
def test_tensor_that_is_changed_without_a_new_version_is_kept(way: str) -> None:
    """Lightning evaluates in inference mode."""
    old, new = Meter(), Meter()
    with torch.inference_mode(way == "inference"):
        old.mean = torch.zeros(3)
    ours, theirs = ScriptAttributes([old]), ScriptAttributes([new])
    for _ in range(2):
        match way:
            case "inference":
                with torch.inference_mode():
                    old.mean += 1.0
            case "data":
                old.mean.data += 1.0
            case "numpy":
                old.mean.numpy()[:] += 1.0
        theirs.put_back(ours.now())
        assert new.mean.tolist() == old.mean.tolist()


def test_tensors_in_a_dictionary_are_named_when_steps_change_them(caplog: pytest.LogCaptureFixture) -> None:
    callback: Any = Meter()
    callback.mean = {"loss": torch.zeros(())}
    attributes = ScriptAttributes([callback])
    attributes.now()
    assert not caplog.records
    callback.mean["loss"] += 1.0
    attributes.now()
    callback.mean["loss"] = torch.ones(())
    attributes.now()
    (record,) = caplog.records
    assert "Meter.mean is changed in the steps, and is not kept" in record.getMessage()


def test_what_is_told_of_a_tensor_and_of_arrays_can_be_in_a_commit(tmp_path: Path) -> None:
    old, new = Meter(), Meter()
    ours, theirs = ScriptAttributes([old]), ScriptAttributes([new])
    old.hear(4.0)

    class State:
        told: dict[str, Any] = ours.now()

        def state_dict(self) -> dict[str, Any]:
            return self.told

        def load_state_dict(self, told: dict[str, Any]) -> None:
            self.told = told

    with Checkpointer(str(tmp_path)) as saving:
        saving.save(1, {"state": State()})
    state = State()
    state.told = {}
    with Checkpointer(str(tmp_path)) as loading:
        loading.restore({"state": state})
    theirs.put_back(state.told)
    assert heard(new) == heard(old)


@pytest.mark.parametrize("name", ["mean", "seen"])
def test_what_is_too_large_is_named_once_when_steps_change_it(name: str, caplog: pytest.LogCaptureFixture) -> None:
    callback: Any = Meter(3000) if name == "mean" else Patience(0)
    if name == "seen":
        callback.seen = [0.0] * 3000
    attributes = ScriptAttributes([callback])
    kind = type(callback).__name__
    assert name not in attributes.now()[f"{kind} 0"]
    assert not caplog.records
    for _ in range(3):
        callback.hear(0.5)
        assert name not in attributes.now()[f"{kind} 0"]
    (record,) = caplog.records
    assert f"{kind}.{name} is changed in the steps, and is not kept" in record.getMessage()


class Halving:
    """Its flag says that the rate was halved, and its meter is an object of the script's."""

    def __init__(self) -> None:
        self.bad, self.halved, self.meter = 0, False, Patience(0)

    def hear(self) -> None:
        self.bad += 1
        self.meter.hear(1.0)
        if self.bad >= 3:
            self.halved = True


def test_flag_that_a_new_process_does_not_take_over_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    old, new = Halving(), Halving()
    ours, theirs = ScriptAttributes([old]), ScriptAttributes([new])
    for _ in range(4):
        old.hear()
        told = ours.now()
    ours.put_back(told)
    assert "halved" not in caplog.text, "this process has it"
    for _ in range(2):
        theirs.put_back(told)
    assert (new.bad, new.halved) == (4, False)
    assert caplog.text.count("Halving.halved was set to True once, and this new process does not take it over") == 1


def test_object_of_the_scripts_in_a_callback_is_named_once_when_steps_change_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    halving, holder = Halving(), Patience(0)
    holder.model = halving  # it is looked at itself
    attributes = ScriptAttributes([halving, holder])
    attributes.now()
    assert "meter" not in caplog.text
    for _ in range(3):
        halving.hear()
        attributes.now()
    assert caplog.text.count("Halving.meter is changed in the steps, and is not kept") == 1
    assert "Patience.model" not in caplog.text


class Averaging:
    def begin(self, world: int) -> None:
        self.world, self.seen = world, 0

    def hear(self) -> None:
        self.seen += 1


def test_what_hooks_set_anew_in_each_pass_is_of_that_pass() -> None:
    callback = Averaging()
    callback.begin(3)
    attributes = ScriptAttributes([callback])
    callback.hear()
    told = attributes.now()
    for world in (2, 3):  # the rank of a process, or the number of them, in the worlds that follow
        attributes.now()
        callback.begin(world)
        attributes.put_back(told)
        assert (callback.world, callback.seen) == (world, 1)
        told = attributes.now()
    new = Averaging()
    new.begin(1)
    ScriptAttributes([new]).put_back(told)
    assert (new.world, new.seen) == (1, 1)


class Positions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.length, self.calls = 0, 0
        self.mask: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if len(x) != self.length:
            self.length, self.mask = len(x), torch.ones(len(x))
        made: torch.Tensor = x * self.mask
        return made


class Buffered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.make(0)

    def make(self, length: int) -> None:
        self.length = length
        self.register_buffer("mask", torch.ones(length), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.length:
            self.make(len(x))
        made: torch.Tensor = x * self.get_buffer("mask")[: len(x)]
        return made


@pytest.mark.parametrize("kind", [Positions, Buffered])
def test_a_new_process_does_not_believe_that_it_has_a_tensor_of_another_one(kind: type[torch.nn.Module]) -> None:
    old, new = kind(), kind()
    ours, theirs = ScriptAttributes([old]), ScriptAttributes([new])
    old(torch.ones(8))
    theirs.put_back(ours.now())
    assert torch.equal(new(torch.ones(8)), torch.ones(8))
    assert getattr(new, "calls", 2) == 2, "a count has been told"


def test_callbacks_of_rank_0_alone_leave_those_of_the_others_in_their_places() -> None:
    first, extra, alone = Averaging(), Patience(0), Averaging()
    for each in (first, alone):
        each.begin(3)
    ours, theirs = ScriptAttributes([extra, first]), ScriptAttributes([alone])
    first.hear()
    extra.hear(0.5)
    theirs.put_back(ours.now())
    assert alone.seen == 1
    alone.hear()
    told = theirs.now()
    ours.put_back(told)
    assert (first.seen, extra.waited, extra.best) == (2, 0, 0.5), "what no other rank has stays"
