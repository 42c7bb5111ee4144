"""What callbacks and modules of a script's own classes keep in their attributes goes with the state of a run."""

from __future__ import annotations

import json
from typing import Any

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
