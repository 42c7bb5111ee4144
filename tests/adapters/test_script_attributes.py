"""What callbacks and modules of a script's own classes keep in their attributes goes with the state of a run."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from everstep.train.adapters.uncounted import ScriptAttributes


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


def test_tensors_and_long_lists_are_left_alone() -> None:
    patience = Patience(0)
    attributes = ScriptAttributes([patience])
    patience.seen = [0.0] * 3000
    assert not attributes.now()["Patience 0"]


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
