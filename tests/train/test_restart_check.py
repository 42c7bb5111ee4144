"""The first step after a restart is compared with what was noted of it: what is refused, and what is not.

Restarts of three processes, under both launchers, are rows of `tests/ordinary`.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import everstep
from everstep.train.guards.comparison import restart_check
from everstep.train.guards.comparison.rehearsed import program
from everstep.train.guards.comparison.restart_check import AGAIN, NEXT, REFUSED

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))
SAVED = 2
pytestmark = pytest.mark.usefixtures("patient_store")
WAIT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs is a file, as under a launcher: pytest's own workers have been given their program as a text."""
    main = types.ModuleType("__main__")
    main.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["train.py"])


class Crash(Exception):
    """Ends a run as a power cut would: nothing of it is saved any more."""


def noted(folder: Path, name: str) -> list[Path]:
    return list(folder.glob(f"data/*/{name}.bin"))


def crash_when_noted(folder: Path, *, waits: bool = True) -> None:
    """`waits`: for a note of the step behind the commit, which comes from a thread of its own."""
    deadline = time.monotonic() + WAIT_SECONDS
    while waits and not noted(folder, NEXT):
        assert time.monotonic() < deadline, "the step behind the commit is not noted"
        time.sleep(0.01)
    raise Crash


def train(
    folder: Path,
    factor: Callable[[], float],
    *,
    until: int = 6,
    crash: int = 0,
    stop: int = 0,
    compare_gradients: bool = True,
    optimizer_of: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    change: Callable[[torch.optim.Optimizer], object] = lambda optimizer: None,
    data: torch.utils.data.Dataset[Any] = DATA,
    **options: Any,
) -> list[torch.Tensor]:
    """A run of one process, whose loss has a factor that no commit holds; its parameters at the end. `crash`: the step
    behind which it dies, once the commit and what is noted of the step behind that are there. `stop`: the step in which
    it is asked to stop. `change`: what is done before each step of the optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = optimizer_of(model.parameters(), lr=0.1)
    with everstep.start(str(folder), every_steps=SAVED, compare_gradients=compare_gradients, **options) as run:
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(run.loader(data, global_batch=8), until=until):
            if crash and step.number == crash:
                crash_when_noted(folder, waits=compare_gradients)
            with step as batch:
                if stop and step.number == stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                given, target = batch.data
                batch.scale(factor() * mse_loss(model(given), target)).backward()
                change(optimizer)
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def crashed(folder: Path, factor: Callable[[], float] = lambda: 1.0, *, compare_gradients: bool = True) -> None:
    with pytest.raises(Crash):
        train(folder, factor, crash=SAVED + 1, compare_gradients=compare_gradients)


@pytest.mark.long
def test_restart_with_the_same_gradients_goes_on(tmp_path: Path) -> None:
    crashed(tmp_path / "a")
    assert noted(tmp_path / "a", NEXT)
    resumed = train(tmp_path / "a", lambda: 1.0)
    assert all(map(torch.equal, resumed, train(tmp_path / "b", lambda: 1.0)))


def test_restart_with_other_gradients_is_refused_each_time_and_nothing_is_saved(tmp_path: Path) -> None:
    crashed(tmp_path)
    for certain in (False, True):  # the second process may find that each one computes another step
        told = r"commit of step 2, .* other gradients .*model\.(weight|bias)"
        with pytest.raises(everstep.LoopError, match=told) as found:
            train(tmp_path, lambda: 0.5)
        assert found.value.certain is certain
        latest = everstep.Checkpointer(str(tmp_path)).latest()
        assert latest is not None
        assert latest.step == SAVED
    assert noted(tmp_path, AGAIN)
    train(tmp_path, lambda: 1.0)  # and the right one goes on


@pytest.mark.long_but("True")
@pytest.mark.parametrize("by_script", [True, False])
def test_file_of_an_argument_excuses_a_difference_only_if_the_script_does_not_write_it(
    by_script: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "named"
    monkeypatch.setattr(sys, "argv", ["train.py", f"--file={file}"])

    def factor(of_run: float) -> float:
        if by_script:
            file.write_text(f"{time.monotonic_ns()}")  # as a script does that saves its model
        return of_run

    file.write_text("rate: 1")
    crashed(tmp_path / "run", lambda: factor(1.0))
    if by_script:
        with pytest.raises(everstep.LoopError, match=r"commit of step 2, .* other gradients "):
            train(tmp_path / "run", lambda: factor(0.5))
    else:
        file.write_text("rate: 0.5")
        train(tmp_path / "run", lambda: factor(0.5))
        assert "The run goes on, because the script or its arguments were changed since" in caplog.text


@pytest.mark.long_but("2-False-True")
@pytest.mark.parametrize(
    ("step", "changed", "again"), [(SAVED, False, True), (SAVED - 1, False, False), (SAVED, True, False)]
)
def test_start_behind_a_refusal_is_refused_where_no_step_is_noted_to_compare_with(
    step: int, changed: bool, again: bool, tmp_path: Path
) -> None:
    crashed(tmp_path, compare_gradients=False)  # it notes no step
    note = {"version": 1, "step": step, "program": "other" if changed else program(), "refusal": "rank 1 is new"}
    (tmp_path / REFUSED).parent.mkdir()
    (tmp_path / REFUSED).write_text(json.dumps(note))
    if again:
        with pytest.raises(
            everstep.LoopError, match=rf"rank 1 is new\. .* at step {step}\. .* commit of step {SAVED}"
        ) as e:
            train(tmp_path, lambda: 1.0)
        assert e.value.certain
        train(tmp_path, lambda: 1.0, compare_gradients=False)
    else:
        train(tmp_path, lambda: 1.0)


@pytest.mark.long_but("1-False")
@pytest.mark.parametrize(("step", "again"), [(SAVED + 2, True), (SAVED - 1, False)])
def test_step_like_the_noted_one_does_not_excuse_a_refusal_that_came_later(
    step: int, again: bool, tmp_path: Path
) -> None:
    crashed(tmp_path)  # the step behind the commit is noted, from before the difference shows
    note = {"version": 1, "step": step, "program": program(), "refusal": "rank 1 is new"}
    (tmp_path / REFUSED).parent.mkdir()
    (tmp_path / REFUSED).write_text(json.dumps(note))
    if again:
        for _ in range(2):
            with pytest.raises(everstep.LoopError, match=rf"rank 1 is new\. .* at step {step}\. .* like the noted one"):
                train(tmp_path, lambda: 1.0)
        train(tmp_path, lambda: 1.0, compare_gradients=False)
    else:
        train(tmp_path, lambda: 1.0)


def halve_rate(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.05


def other_momenta(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.8, 0.99)


def clip(optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer_of", "change", "named"),
    [
        (torch.optim.SGD, halve_rate, r"optimizer\.param_groups\[0\]\['lr'\] is 0\.05, and was 0\.1"),
        (torch.optim.Adam, other_momenta, r"\['betas'\]\[0\] is 0\.8, and was 0\.9\. "),
        (torch.optim.SGD, clip, r"the optimizer is given other gradients of model\.weight"),
    ],
)
def test_restart_with_the_same_gradients_and_another_update_is_refused(
    tmp_path: Path,
    optimizer_of: Callable[..., torch.optim.Optimizer],
    change: Callable[[torch.optim.Optimizer], object],
    named: str,
) -> None:
    """Gradients are equal, and the parameters would not be: a counter sets the rate, a history of norms clips."""
    with pytest.raises(Crash):
        train(tmp_path, lambda: 1.0, crash=SAVED + 1, optimizer_of=optimizer_of)
    for _ in range(2):
        with pytest.raises(everstep.LoopError, match=rf"commit of step 2, .* otherwise than before: .*{named}"):
            train(tmp_path, lambda: 1.0, optimizer_of=optimizer_of, change=change)
    train(tmp_path, lambda: 1.0, optimizer_of=optimizer_of)


@pytest.mark.long
def test_data_that_are_others_at_each_start_are_refused_at_each(tmp_path: Path) -> None:
    """To the gradients alone it looks like a step that nobody computes twice alike, and the second restart went on."""

    def shuffled(seed: int) -> torch.utils.data.Dataset[Any]:
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed)).tolist()
        return torch.utils.data.Subset(DATA, order)

    with pytest.raises(Crash):
        train(tmp_path, lambda: 1.0, crash=SAVED + 1, data=shuffled(0))
    for seed in (1, 2, 3):
        with pytest.raises(everstep.LoopError, match="reads otherwise than when the run was saved") as found:
            train(tmp_path, lambda: 1.0, data=shuffled(seed))
        assert found.value.certain
        latest = everstep.Checkpointer(str(tmp_path)).latest()
        assert latest is not None
        assert latest.step == SAVED


@pytest.mark.long
def test_update_that_is_another_each_time_goes_on_in_the_second_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def anew(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 * int.from_bytes(os.urandom(2), "big") + 0.001

    with pytest.raises(Crash):
        train(tmp_path, lambda: 1.0, crash=SAVED + 1, change=anew)
    with pytest.raises(everstep.LoopError, match=r"param_groups"):
        train(tmp_path, lambda: 1.0, change=anew)
    with caplog.at_level(logging.WARNING, "everstep.train"):
        train(tmp_path, lambda: 1.0, change=anew)
    assert "another result each time" in caplog.text


@pytest.mark.long
def test_step_that_nobody_computes_twice_alike_goes_on_in_the_second_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = random.SystemRandom()
    crashed(tmp_path, own.random)
    with pytest.raises(everstep.LoopError, match="other gradients"):
        train(tmp_path, own.random)
    with caplog.at_level(logging.WARNING, "everstep.train"):
        train(tmp_path, own.random)
    assert "another result each time" in caplog.text


@pytest.mark.long
def test_script_that_was_changed_is_warned_of_and_not_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "--loss-factor=0.5"])
    with caplog.at_level(logging.WARNING, "everstep.train"):
        train(tmp_path, lambda: 0.5)
    assert "The run goes on, because the script or its arguments were changed since" in caplog.text


@pytest.mark.long
def test_configuration_file_that_was_changed_is_warned_of_and_not_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = tmp_path / "options.yaml"
    options.write_text("factor: 1.0")
    monkeypatch.setattr("sys.argv", ["train.py", f"--options={options}"])
    crashed(tmp_path / "run")
    options.write_text("factor: 0.5")
    with caplog.at_level(logging.WARNING, "everstep.train"):
        train(tmp_path / "run", lambda: 0.5)
    assert "The run goes on, because the script or its arguments were changed since" in caplog.text


@pytest.mark.long
def test_script_without_a_file_is_warned_of_and_not_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # a notebook: its cells may have changed
    crashed(tmp_path)
    with caplog.at_level(logging.WARNING, "everstep.train"):
        train(tmp_path, lambda: 0.5)
    assert "other gradients" in caplog.text


@pytest.mark.long
def test_machine_of_another_kind_may_round_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow() -> float:
        return 1.003  # as a kernel that computes in bfloat16 may differ from one that does not

    crashed(tmp_path)
    with pytest.raises(everstep.LoopError):
        train(tmp_path, narrow)
    monkeypatch.setattr(restart_check, "kernels", lambda: "another machine")
    train(tmp_path, narrow)


@pytest.mark.long
def test_run_that_was_suspended_is_compared_too(tmp_path: Path) -> None:
    """No step follows the commit with which it leaves: one is begun for that, and not made."""
    with pytest.raises(everstep.Preempted) as left:
        train(tmp_path / "a", lambda: 1.0, stop=2)
    assert left.value.committed
    assert left.value.step == 3
    assert len(noted(tmp_path / "a", NEXT)) == 2  # of the second step's commit, too
    with pytest.raises(everstep.LoopError, match=r"commit of step 3, .* other gradients"):
        train(tmp_path / "a", lambda: 0.5)
    resumed = train(tmp_path / "a", lambda: 1.0)
    assert all(map(torch.equal, resumed, train(tmp_path / "b", lambda: 1.0)))


def test_step_behind_the_last_commit_moves_no_optimizer(tmp_path: Path) -> None:
    steps: list[int] = []

    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            steps.append(1)
            return super().step(closure)

    with pytest.raises(everstep.Preempted):
        train(tmp_path, lambda: 1.0, stop=2, optimizer_of=Counted)
    assert len(noted(tmp_path, NEXT)) == 2
    assert len(steps) == 3  # the fourth was ended by its hook, before it began


@pytest.mark.long
def test_two_optimizers_in_a_step_are_compared_by_what_comes_before_the_first(tmp_path: Path) -> None:
    """A run that was suspended notes a step that it leaves there, and one that was not a whole step."""

    def gan(stop: int = 0, crash: int = 0) -> None:
        torch.manual_seed(0)
        first, second = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
        one, two = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second))
        with everstep.start(str(tmp_path), every_steps=SAVED) as run:
            run.track(first=first, second=second, one=one, two=two)
            for step in run.steps(run.loader(DATA, global_batch=8), until=8):
                if crash and step.number == crash:
                    crash_when_noted(tmp_path)
                with step as batch:
                    if stop and step.number == stop:
                        os.kill(os.getpid(), signal.SIGTERM)
                    data, target = batch.data
                    for model, optimizer in ((first, one), (second, two)):
                        batch.scale(mse_loss(model(data), target + first(data).detach())).backward()
                        optimizer.step()
                        optimizer.zero_grad()

    with pytest.raises(Crash):
        gan(crash=SAVED + 1)
    with pytest.raises(everstep.Preempted):
        gan(stop=4)
    gan()


@pytest.mark.long
def test_step_that_is_not_made_leaves_as_without_it_whatever_happens_in_it(tmp_path: Path) -> None:
    calls: list[int] = []

    def breaks() -> float:
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("the script's own")
        return 1.0

    with pytest.raises(everstep.Preempted) as left:
        train(tmp_path / "a", breaks, stop=2)
    assert len(calls) == 4
    assert left.value.committed
    resumed = train(tmp_path / "a", lambda: 1.0)
    assert all(map(torch.equal, resumed, train(tmp_path / "b", lambda: 1.0)))


def test_short_grace_period_is_not_spent_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_GRACE_SECONDS", "3")
    with pytest.raises(everstep.Preempted):
        train(tmp_path, lambda: 1.0, stop=2)
    assert len(noted(tmp_path, NEXT)) == 1  # of the second step's commit, and not of the last


@pytest.mark.long
def test_without_comparison_nothing_is_noted_and_nothing_compared(tmp_path: Path) -> None:
    crashed(tmp_path / "a", compare_gradients=False)
    assert not noted(tmp_path / "a", NEXT)
    crashed(tmp_path / "b")
    train(tmp_path / "b", lambda: 0.5, compare_gradients=False)


@pytest.mark.long
@pytest.mark.parametrize("damage", [b"", b"\xff" * 7, b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0{}"])
def test_note_that_cannot_be_read_costs_nothing(tmp_path: Path, damage: bytes) -> None:
    crashed(tmp_path)
    (note,) = noted(tmp_path, NEXT)
    note.write_bytes(damage)
    train(tmp_path, lambda: 0.5)


def test_of_a_note_of_a_larger_world_only_values_are_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = restart_check.RestartCheck.begin
    monkeypatch.setattr(restart_check.RestartCheck, "begin", lambda self, rank, _: begin(self, rank, 3))
    crashed(tmp_path)
    monkeypatch.undo()
    train(tmp_path, lambda: 0.5)
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("step after this restart are not compared: the world had 3 ranks, and has 1" in text for text in warned)
    assert any("not those of the run before this restart: crash (3 there, 0 in" in text for text in warned)


@pytest.mark.long
def test_note_goes_with_its_commit(tmp_path: Path) -> None:
    crashed(tmp_path)
    (note,) = noted(tmp_path, NEXT)
    for until in (10, 12, 14, 16):  # each ends with a commit; three are kept
        train(tmp_path, lambda: 1.0, until=until)
    assert not note.parent.exists()
    assert len(list((tmp_path / "data").iterdir())) == len(everstep.Checkpointer(str(tmp_path)).list()) == 3
