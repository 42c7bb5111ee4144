"""An undisturbed run that tests share is made once, and again if it failed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

import everstep
from support.recipes import shared
from support.recipes.recipes import Ended, RecipeFailed, loaded
from support.recipes.shared import SharedRuns


class Runs:
    """Stands for `undisturbed`: a run whose commit has one tensor. `fails`: how many runs fail first."""

    def __init__(self, fails: int = 0) -> None:
        self.made, self._fails = list[Path](), fails

    def __call__(self, name: str, folder: Path, arguments: Any, *_: Any, **variables: str) -> Ended:
        self.made.append(folder)
        with everstep.Checkpointer(str(folder / "commits")) as checkpointer:
            checkpointer.save(1, {"values": torch.tensor([float(one) for one in arguments])})
        if len(self.made) <= self._fails:
            raise RecipeFailed(f"{name} failed")
        return loaded(folder, f"printed by {name}")


def test_a_run_is_made_once_for_all_who_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "undisturbed", runs := Runs())
    together = Barrier(4)

    def ask(arguments: tuple[str, ...]) -> Ended:
        together.wait(30)
        return SharedRuns(tmp_path)("one", arguments)  # each process of xdist has an object of its own

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(ask, [("1",), ("1",), ("1",), ("2",)]))
    assert len(runs.made) == 2, "other arguments are another run"
    assert [float(ended.state["values"]) for ended in found] == [1, 1, 1, 2]
    assert {ended.output for ended in found} == {"printed by one"}


def test_a_run_that_failed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "undisturbed", runs := Runs(fails=1))
    with pytest.raises(RecipeFailed):
        SharedRuns(tmp_path)("one", ("1",))
    assert SharedRuns(tmp_path)("one", ("1",)).step == 1
    assert len(runs.made) == 2
