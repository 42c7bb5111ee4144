"""Mistakes that a newcomer makes when he converts his script: each is told with the line to write."""

# ruff: noqa: PT012 - what raises is a whole loop
from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import everstep
from everstep.data import BatchUnusable
from everstep.train import step as steps

BATCHES: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8)), batch_size=4)


def taken() -> Iterator[steps.Step]:
    with everstep.start() as run:
        yield from run.steps(BATCHES, until=2)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("data", r"`batch\.data`"),
        ("to", r"`batch\.to`"),
        ("weight", r"`batch\.weight`"),
        ("images", r"`batch\.data`"),
        ("keys", r"`batch\.data`"),
    ],
)
def test_step_in_place_of_its_batch_says_how_to_get_the_batch(name: str, instead: str) -> None:
    with pytest.raises(everstep.LoopError, match=rf"step\.{name}: .*`with step as batch:`.*{instead}"):
        getattr(next(taken()), name)


def test_step_that_is_indexed_or_unpacked_says_how_to_get_the_batch() -> None:
    step: Any = next(taken())
    with pytest.raises(everstep.LoopError, match=r"`with step as batch:`.*`batch\.data\['x'\]`"):
        step["x"]
    with pytest.raises(everstep.LoopError, match=r"`with step as batch:`.*`x, y = batch\.data`"):
        _x, _y = step
    assert not hasattr(step, "shape"), "who only asks gets an answer"


def test_loss_that_is_scaled_without_a_loader_is_to_be_used_as_it_is() -> None:
    run = everstep.start()
    step = next(run.steps(until=2))
    with pytest.raises(everstep.LoopError, match=r"without a loader.*Use the loss as it is"), step:
        run.scale(torch.ones(()))


def test_batch_in_place_of_its_data_says_where_they_are() -> None:
    for step in everstep.start().steps(BATCHES, until=2):
        with step as batch:
            with pytest.raises(BatchUnusable, match=r"`batch\.data\['x'\]`"):
                batch["x"]
            with pytest.raises(BatchUnusable, match=r"`batch\.data\.edge_index`"):
                _ = batch.edge_index
            with pytest.raises(BatchUnusable, match=r"`\*\*batch\.data`"):
                dict(**batch)
            assert not hasattr(batch, "shape"), "who only asks gets an answer"


@pytest.mark.parametrize(
    ("passed", "said"),
    [
        ((x for x in ()), r"generator.*DataLoader"),
        (enumerate(BATCHES), r"enumerate.*the DataLoader itself"),
        (iter(BATCHES), r"the DataLoader itself"),
        (range(4), r"range.*until=4"),
        (TensorDataset(torch.zeros(4)), r"TensorDataset.*run\.loader\(dataset, global_batch=…\)"),
        (DataLoader((x for x in (1, 2)), batch_size=1), r"generator.*__len__"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_iterated_again_is_refused_with_what_may_be_passed(passed: Any, said: str) -> None:
    with pytest.raises(everstep.LoopError, match=said):
        next(everstep.start().steps(passed, until=4))


@pytest.mark.parametrize("arguments", [(3, BATCHES), (BATCHES, None), (None, 3)])
def test_epochs_of_other_arguments_says_which_it_takes(arguments: Any) -> None:
    with pytest.raises(everstep.LoopError, match=r"write `run\.epochs\(loader, 10\)`"):
        next(everstep.start().epochs(*arguments))


class Trainer:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


def test_track_without_names_is_told_with_the_names_of_the_call() -> None:
    net, trainer = torch.nn.Linear(2, 2), Trainer()
    run = everstep.start()
    with pytest.raises(everstep.LoopError, match=r"write `run\.track\(net=net, optimizer=trainer\.optimizer\)`"):
        run.track(net, trainer.optimizer)
    with pytest.raises(everstep.LoopError, match=r"write `run\.track\(net=net, linear=…, scaler=scaler\)`"):
        run.track(net, torch.nn.Linear(1, 1), scaler=torch.amp.GradScaler(enabled=False))


def test_track_in_the_loop_says_where_it_belongs() -> None:
    said = r"run\.track\(average=average\).*before.*`for step in run\.steps"
    with pytest.raises(everstep.LoopError, match=said), everstep.start() as run:
        for step in run.steps(until=3):
            with step:
                pass
            run.track(average=torch.zeros(1))


def test_error_that_is_caught_around_a_step_is_named() -> None:
    with pytest.raises(everstep.LoopError, match=r"step 0.*ValueError: a damaged sample.*`try`") as told:
        for step in everstep.start().steps(until=3):
            try:
                with step:
                    raise ValueError("a damaged sample")
            except ValueError:
                continue
    assert isinstance(told.value.__cause__, ValueError)


def test_error_that_is_caught_around_the_loop_is_named() -> None:
    said = r"step 0.*ValueError: a damaged sample"
    with pytest.raises(everstep.LoopError, match=said) as told, everstep.start() as run, suppress(ValueError):
        for step in run.steps(until=3):
            with step:
                raise ValueError("a damaged sample")
    assert isinstance(told.value.__cause__, ValueError)


def test_union_in_a_run_is_refused_with_where_it_belongs() -> None:
    run = everstep.start()
    with pytest.raises(
        everstep.LoopError, match=r"track\(stage=…\): everstep\.Union.*with everstep\.Checkpointer, without a run"
    ):
        run.track(stage=everstep.Union(torch.nn.Linear(1, 1)))
    run.close()
