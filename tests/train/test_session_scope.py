"""What a script does outside of the steps of its loop, in a process alone: the same calls as in a job of many."""

# ruff: noqa: PT012, B023 - what raises is a whole loop, and each lambda is called in its own turn of one
from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint import Catalog
from everstep.storage import open_store


def saved(folder: Path) -> list[int]:
    return [found.step for found in Catalog(open_store(str(folder))).list()]


def test_a_loop_that_is_left_is_complete_and_saved(tmp_path: Path) -> None:
    with everstep.start(str(tmp_path)) as run:
        run.track(weight=torch.zeros(1))
        for step in run.steps(until=10):
            with step:
                pass
            if run.step == 3:
                break
    assert saved(tmp_path) == [3]


def test_sys_exit_inside_a_step_is_refused_and_saves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(everstep.LoopError, match=r"inside step 2, by sys.exit\(\)"),
        everstep.start(str(tmp_path)) as run,
    ):
        run.track(weight=torch.zeros(1))
        for step in run.steps(until=10):
            with step:
                if step.number == 2:
                    sys.exit()
    assert saved(tmp_path) == []


def test_an_exit_that_says_failure_stays_one(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended, everstep.start(str(tmp_path)) as run:
        run.track(weight=torch.zeros(1))
        for step in run.steps(until=10):
            with step:
                pass
            sys.exit(3)
    assert ended.value.code == 3
    assert saved(tmp_path) == []


def test_a_handler_of_sigterm_that_is_set_in_the_loop_is_refused() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(everstep.LoopError, match="Leave that handler out"), everstep.start() as run:
            for step in run.steps(until=3):
                with step:
                    signal.signal(signal.SIGTERM, lambda *_: None)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_evaluation_leaves_modes_buffers_and_generators_as_they_were() -> None:
    norm = torch.nn.BatchNorm1d(2)
    called: list[int] = []
    drawn: list[float] = []

    def evaluate() -> dict[str, Any]:
        called.append(run.step)
        norm(torch.randn(4, 2))  # moves its buffers, in train mode
        norm.eval()
        return {"figure": 1.0}

    for evaluates in (True, False):
        torch.manual_seed(0)
        with everstep.start() as run:
            run.track(norm=norm)
            if evaluates:
                run.evaluate(evaluate, every=2)
            run.train(lambda _: drawn.append(torch.rand(1).item()), until=5)
    assert called == [2, 4, 5]
    assert norm.training
    assert int(norm.num_batches_tracked) == 0  # type: ignore[arg-type]
    assert drawn[:5] == drawn[5:]


def test_an_evaluation_that_trains_is_refused_by_the_parameters_name() -> None:
    model = torch.nn.Linear(1, 1)

    def evaluate() -> None:
        with torch.no_grad():
            model.weight += 1

    with pytest.raises(everstep.LoopError, match=r"has changed model\.weight"), everstep.start() as run:
        run.track(model=model)
        run.evaluate(evaluate, every=1)
        run.train(lambda _: None, until=2)


def test_an_evaluation_that_moves_a_parameter_behind_torchs_back_is_refused_too() -> None:
    model = torch.nn.Linear(1, 1)

    with pytest.raises(everstep.LoopError, match=r"has changed model\.weight"), everstep.start() as run:
        run.track(model=model)
        run.evaluate(lambda: model.weight.data.add_(1), every=1)
        run.train(lambda _: None, until=2)


def test_an_evaluation_may_exchange_the_weights_and_bring_them_back() -> None:
    model = torch.nn.Linear(1, 1)
    seen = []

    def evaluate() -> None:
        kept = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.fill_(7)
            seen.append(model.weight.item())
            model.weight.copy_(kept)

    with everstep.start() as run:
        run.track(model=model)
        run.evaluate(evaluate, every=1)
        run.train(lambda _: None, until=2)
    assert seen == [7, 7]


@pytest.mark.long
def test_what_was_done_once_is_not_done_again_by_a_resumed_run(tmp_path: Path) -> None:
    values = []
    for until in (2, 4):
        with everstep.start(str(tmp_path)) as run:
            first = run.once(lambda: {"pid": os.getpid(), "until": until})
            with pytest.raises(everstep.LoopError, match="before the first step"):
                _ = first.value
            run.track(weight=torch.zeros(1))
            run.train(lambda _: values.append(first.value), until=until)
    assert {value["until"] for value in values} == {2}
    assert len(values) == 4


def test_what_json_cannot_hold_is_refused() -> None:
    with everstep.start() as run, pytest.raises(everstep.LoopError, match="fn returned what JSON cannot hold"):
        run.once(object, each="machine")
