"""An optimizer or a schedule that a script has loaded from a file of its own is noticed before the run's first step."""

from __future__ import annotations

import logging

import pytest
import torch

import everstep
from everstep.rehearse.play import loaded_in
from everstep.train.guards.loaded_before import moved_before

OPTIMIZERS = (torch.optim.AdamW, torch.optim.Adagrad, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))


def test_what_has_taken_steps_is_named_and_what_is_new_is_not() -> None:
    net = torch.nn.Linear(2, 1)
    state = {f"opt{i}": make(net.parameters()) for i, make in enumerate(OPTIMIZERS)}
    first = state["opt0"]
    schedule = torch.optim.lr_scheduler.StepLR(first, 10)
    assert moved_before({"net": net, "kept": {"step": 3}, "schedule": schedule, **state}) == []
    net(torch.ones(1, 2)).sum().backward()
    for one in state.values():
        one.step()
    schedule.step()
    assert moved_before({"net": net, "schedule": schedule, **state}) == ["schedule", *state]


def test_chain_of_schedules_that_counts_nothing_itself_is_judged_by_its_parts() -> None:
    opt = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    chain = torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(opt, 0.5, 3), torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)]
    )
    assert moved_before({"chain": chain}) == []
    opt.step()
    chain.step()
    assert moved_before({"chain": chain}) == ["chain"]


@pytest.mark.parametrize("step", [[3], None, torch.ones(2), "third"])
def test_optimizer_that_keeps_something_else_as_its_step_is_no_error(step: object) -> None:
    opt = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    opt.state[opt.param_groups[0]["params"][0]]["step"] = step
    assert moved_before({"opt": opt}) == []


def test_run_that_begins_with_a_loaded_optimizer_warns_of_it(caplog: pytest.LogCaptureFixture) -> None:
    net = torch.nn.Linear(2, 1)
    opt = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    opt.step()
    opt.zero_grad()
    with caplog.at_level(logging.WARNING, "everstep.train"), everstep.start() as run:
        run.track(net=net, opt=opt)
        for step in run.steps(until=1):
            with step:
                net(torch.ones(1, 2)).sum().backward()
                opt.step()
                opt.zero_grad()
    assert loaded_in(caplog.text) == "opt"
    assert "run.epochs(loader, epochs - first)" in caplog.text
