"""A run has one loop: a second one over steps or epochs that are kept in a variable would train nothing."""

# ruff: noqa: PT012 - what raises is a whole loop
from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import everstep

BATCHES: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8)), batch_size=4)
ONE_LOOP = r"a second loop over the steps of this run.*`for epoch in run\.epochs\(loader, 10\):`"
CAUGHT = """
import everstep
run = everstep.start()
steps = enumerate(run.steps(until=3))
for epoch in range(2):
    try:
        for _, step in steps:
            with step:
                pass
    except Exception as error:
        print(error)
"""


def take(steps: Any) -> int:
    """How many."""
    n = 0
    for step in steps:
        with step:
            n += 1
    return n


@pytest.mark.parametrize("wrapped", [iter, enumerate])
def test_steps_in_a_variable_are_refused_a_second_loop(wrapped: Any) -> None:
    run = everstep.start()
    steps = wrapped(run.steps(until=3))
    taken = (step[1] if isinstance(step, tuple) else step for step in steps)
    assert take(taken) == 3
    with pytest.raises(everstep.LoopError, match=ONE_LOOP):
        list(steps)
    assert run.step == 3


def test_steps_are_taken_in_parts() -> None:
    """More parts than there are steps for is no second loop."""
    steps = everstep.start().steps(until=5)
    assert [take(islice(steps, 2)) for _ in range(5)] == [2, 2, 1, 0, 0]


def test_one_for_statement_goes_on_behind_its_break() -> None:
    steps = everstep.start().steps(until=5)
    taken = []
    for _ in range(3):
        for step in steps:
            with step:
                taken.append(step.number)
            if step.number % 2:
                break
    assert taken == [0, 1, 2, 3, 4]


def test_second_for_statement_over_steps_that_are_left_is_refused() -> None:
    """A new process would train in the first one for all steps that are left."""
    run = everstep.start()
    steps = run.steps(until=5)
    for step in steps:
        with step:
            pass
        if step.number == 1:
            break
    said = r"a second loop.*behind step 2: a process that takes a lost one's place.*For phases: one loop"
    with pytest.raises(everstep.LoopError, match=said):
        for _ in steps:
            pass


def test_refusal_of_a_second_loop_that_is_caught_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CAUGHT)
    done = subprocess.run(
        [sys.executable, tmp_path / "train.py"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1
    assert "a second loop over the steps of this run" in done.stderr


def test_epochs_in_a_variable_are_refused_a_second_loop() -> None:
    run = everstep.start()
    epochs = run.epochs(BATCHES, 2)
    assert [take(run.steps()) for _ in epochs] == [2, 2]
    with pytest.raises(everstep.LoopError, match=ONE_LOOP):
        list(epochs)


def test_second_loop_over_the_steps_of_an_epoch_is_refused() -> None:
    run = everstep.start()
    said = (
        r"a second loop over the steps of one epoch, behind step 2.*Write it once in the body of the loop over epochs"
    )
    with pytest.raises(everstep.LoopError, match=said):
        for _ in run.epochs(BATCHES, 2):
            run.train(lambda _: None)
            run.train(lambda _: None)


def test_steps_of_an_epoch_are_not_asked_for_again_behind_an_error() -> None:
    run = everstep.start()
    with pytest.raises(everstep.LoopError, match=r"step 0.*ValueError: a damaged sample"):
        for _ in run.epochs(BATCHES, 2):
            with suppress(ValueError):
                for step in run.steps():
                    with step:
                        raise ValueError("a damaged sample")
            take(run.steps())


def test_error_that_ended_steps_in_a_variable_is_named_to_a_second_loop() -> None:
    steps = everstep.start().steps(until=3)
    with suppress(everstep.LoopError):
        next(steps)
        next(steps)
    with pytest.raises(everstep.LoopError, match=r"called again.*step 0 was taken and not completed"):
        list(steps)


def test_process_that_began_in_the_middle_may_ask_behind_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps that are taken in parts end in an earlier part there."""
    weight = torch.zeros(1)
    with everstep.start(str(tmp_path), every_steps=1) as run:
        run.track(weight=weight)
        for step in run.steps(until=4):
            with step:
                weight += 1
            if run.step == 2:
                break
    with everstep.start(str(tmp_path), every_steps=1) as run:
        run.track(weight=weight)
        steps = run.steps(until=4)
        assert [take(islice(steps, 2)) for _ in range(4)] == [2, 0, 0, 0]
    assert [record.message.partition(":")[0] for record in caplog.records if "is over" in record.message] == [
        "the loop of this run is over, and this process asks for its steps again"
    ]
