"""Which commits of a session are kept as the best, by what the script logs anyway."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint import Catalog, Keep
from everstep.checkpoint.ranks import Alone
from everstep.storage import open_store
from everstep.train.coordination.step_coordinator import StepCoordinator


def metrics_by_step(folder: Path) -> dict[int, dict[str, float]]:
    return {found.step: dict(found.metrics) for found in Catalog(open_store(str(folder))).list()}


def checkpointer(folder: Path, **keep: Any) -> everstep.Checkpointer:
    return everstep.Checkpointer(str(folder), every_steps=1, keep=Keep(**keep))


LOSSES = [5.0, 2.0, 4.0, 1.0, 3.0, 6.0]


@pytest.mark.long
@pytest.mark.parametrize("where", ["in the step", "behind it"])
def test_best_commits_by_a_metric_that_the_script_logs_stay(where: str, tmp_path: Path) -> None:
    weight = torch.zeros(1)
    made = checkpointer(tmp_path, last=1, best=2, metric="loss")
    with everstep.start(made) as run:
        run.track(weight=weight)
        for step in run.steps(until=6):
            loss = torch.tensor(LOSSES[step.number], requires_grad=True)
            with step:
                weight += 1
                if where == "in the step":
                    run.log(loss=loss, vector=torch.zeros(3), text="no number")
            if where == "behind it":
                run.log(loss=loss)
            made.wait(60)  # else a save that comes while one is in flight is left out
    assert metrics_by_step(tmp_path) == {2: {"loss": 2.0}, 4: {"loss": 1.0}, 6: {"loss": 6.0}}


@pytest.mark.long
def test_metric_of_an_evaluation_belongs_to_the_commit_of_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.zeros(1)

    def evaluate() -> dict[str, float]:
        run.log(also=1.0)
        return {"error": 9.0 - run.step}

    made = checkpointer(tmp_path, last=9, best=1, metric="error")
    with everstep.start(made) as run, caplog.at_level(logging.WARNING):
        run.track(weight=weight)
        run.evaluate(evaluate, every=2)
        for step in run.steps(until=4):
            with step:
                weight += 1
            made.wait(60)
    of_evaluation = {"also": 1.0}
    assert metrics_by_step(tmp_path) == {
        1: {}, 2: {"error": 7.0, **of_evaluation}, 3: {}, 4: {"error": 5.0, **of_evaluation}
    }  # fmt: skip
    told = [r.getMessage() for r in caplog.records if "Keep(best=1" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("step 1: a save without a finite number 'error' is not among those")
    assert "run.log(error=…)" in told[0]


def test_best_commit_by_an_evaluation_after_its_save_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight, errors = torch.zeros(1), iter([5.0, 2.0, 4.0, 1.0, 3.0, 6.0])
    made = checkpointer(tmp_path, last=1, best=2, metric="error")
    with everstep.start(made) as run, caplog.at_level(logging.WARNING):
        run.track(weight=weight)
        run.evaluate(lambda: {"error": torch.tensor(next(errors))}, every=1)
        for step in run.steps(until=6):
            with step:
                weight += 1
            made.wait(60)
    assert metrics_by_step(tmp_path) == {2: {"error": 2.0}, 4: {"error": 1.0}, 6: {"error": 6.0}}
    assert not [r for r in caplog.records if "Keep(best=2" in r.getMessage()]


@pytest.mark.long
def test_value_that_the_script_adds_to_later_is_kept_as_it_was_logged(tmp_path: Path) -> None:
    weight, total = torch.zeros(1), torch.zeros(())
    with everstep.start(str(tmp_path), every_steps=1, keep=Keep(last=1)) as run:
        run.track(weight=weight, total=total)
        for step in run.steps(until=1):
            with step:
                weight += 1
                run.log(total=total, loss=float("nan"))
                total += 1
    assert metrics_by_step(tmp_path) == {1: {"total": 0.0}}


@pytest.mark.long_but("of a peer")
@pytest.mark.parametrize("loss", ["of a peer", "of rank 0", "of all"])
def test_evaluation_that_is_repeated_after_a_loss_gives_the_commit_its_metric(loss: str, tmp_path: Path) -> None:
    state: dict[str, Any] = {"weight": torch.zeros(1)}

    def begun() -> StepCoordinator:
        made = checkpointer(tmp_path, last=1, best=1, metric="error")
        coordinator = StepCoordinator.find(made, None, None, {})
        coordinator.begin(state)
        return coordinator

    run = begun()
    run.completed(1)
    assert run.schedule is not None
    run.schedule.checkpointer.wait(60)
    if loss == "of a peer":
        run.move(Alone(), 2, "rendezvous")
    elif loss == "of rank 0":  # whose part a new process plays, which a peer gives the state
        run = StepCoordinator.find(checkpointer(tmp_path, last=1, best=1, metric="error"), None, None, {})
        run.join()
        run.track(state)
        run.move(Alone(), 2, "rendezvous")
        run.step = 1
    else:
        run.close()
        run = begun()
    assert run.step == 1
    run.log({"before": 1.0}, of_state=True)
    with run.evaluating():
        run.log({"error": 2.0})
    for step, error in ((2, 4.0), (3, 3.0)):
        run.completed(step)
        with run.evaluating():
            run.log({"error": error})
        assert run.schedule is not None
        run.schedule.checkpointer.wait(60)
    run.close()
    assert metrics_by_step(tmp_path) == {1: {"before": 1.0, "error": 2.0}, 3: {"error": 3.0}}
