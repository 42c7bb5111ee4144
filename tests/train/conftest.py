"""Runs of the training script, alone and as ranks of a world."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.train.coordination import save_schedule
from support import TESTS
from support.train.training_run import Launched, Start, Started


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(ranks, *arguments)`: 0 ranks is one process without a world. `launched`: by `python` or `torchrun`. What
    still runs at the end is killed."""
    made: list[Started] = []

    def begin(ranks: int, *arguments: object, launched: bool = False) -> Started:
        kind = Launched if launched else Started
        made.append(kind(ranks, [str(a) for a in arguments], tmp_path / f"run-{len(made)}.txt"))
        return made[-1]

    yield begin
    for run in made:
        run.kill()


@pytest.fixture
def patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a folder may take longer to answer than a run waits, which then compares nothing, and warns."""
    monkeypatch.setattr(save_schedule, "ASK_SECONDS", 60.0)


@pytest.fixture
def no_other_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this file of tests is among the modules of this process: all others that it has collected would be taken for
    modules of the script, and be read with it in each comparison."""
    for name, module in list(sys.modules.items()):
        if module is not request.module and Path(getattr(module, "__file__", None) or "/").is_relative_to(TESTS):
            monkeypatch.delitem(sys.modules, name)
