"""What a failed step leaves behind: nothing, or a completed step, or a torn state that says so."""

import copy
import random
from typing import Any

import pytest
import torch

from everstep.train.recovery.agreement import Quality
from everstep.train.recovery.replay import Replay


def parts(optimizers: int = 1) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    state: dict[str, Any] = {"model": model, "scaler": torch.amp.GradScaler("cpu", init_scale=4.0), "seen": {"n": [1]}}
    for i in range(optimizers):
        # One of them has only what it needs for a step of its own.
        state[f"optimizer{i}"] = torch.optim.SGD(model.parameters(), lr=0.1)
        state[f"scheduler{i}"] = torch.optim.lr_scheduler.StepLR(state[f"optimizer{i}"], 1)
    return state


def forward(state: dict[str, Any]) -> torch.Tensor:
    loss = state["model"](torch.randn(8, 3)).sum()
    state["scaler"].scale(loss).backward()
    state["scaler"].unscale_(state["optimizer0"])
    return loss.detach()


def contents(state: dict[str, Any]) -> Any:
    return (
        [t.clone() for t in state["model"].state_dict().values()], state["scheduler0"].state_dict(),
        state["scaler"].state_dict(), copy.deepcopy(state["seen"]), torch.get_rng_state().clone(), random.getstate(),
    )  # fmt: skip


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True)) and repr(a[1:]) == repr(b[1:])


def test_step_that_failed_before_its_optimizer_leaves_no_trace_and_repeats_to_the_same_bits() -> None:
    state = parts()
    replay = Replay(state, lambda: None)
    replay.begin(0)
    before = contents(state)
    first = forward(state)
    state["scaler"].update(9.0)
    state["seen"]["n"].append(2)
    random.random()
    assert replay.back() is Quality.WHOLE
    assert same(contents(state), before)
    assert all(p.grad is None for p in state["model"].parameters())
    assert torch.equal(forward(state), first)


def test_step_whose_optimizer_has_stepped_counts_and_its_schedule_moves_once() -> None:
    for scheduled in (False, True):
        state = parts()
        replay = Replay(state, lambda: None)
        replay.begin(0)
        forward(state)
        state["optimizer0"].step()
        if scheduled:
            state["scheduler0"].step()
        moved = [p.detach().clone() for p in state["model"].parameters()]
        assert replay.back() is Quality.TAIL_LOST
        assert all(torch.equal(p, m) for p, m in zip(state["model"].parameters(), moved, strict=True))
        assert state["scheduler0"].last_epoch == 1


@pytest.mark.parametrize("kind", ["one", "chained"])
def test_schedule_that_moves_in_each_step_moves_though_a_peer_was_lost_before_it_did(kind: str) -> None:
    state = parts()
    if kind == "chained":
        state["scheduler0"] = torch.optim.lr_scheduler.ChainedScheduler([state["scheduler0"]])
    replay = Replay(state, lambda: None)
    for step in range(3):
        replay.begin(step)
        state["optimizer0"].step()
        state["scheduler0"].step()
    rate = state["optimizer0"].param_groups[0]["lr"]
    replay.begin(3)
    state["optimizer0"].step()
    assert replay.back() is Quality.TAIL_LOST
    assert state["optimizer0"].param_groups[0]["lr"] == pytest.approx(rate / 10)
    # A process that has begun since, and was given this state, judges alike.
    replay = Replay(state, lambda: None)
    replay.begin(4)
    state["optimizer0"].step()
    assert replay.back() is Quality.TAIL_LOST
    assert state["optimizer0"].param_groups[0]["lr"] == pytest.approx(rate / 100)


def test_schedule_of_epochs_does_not_move_with_a_step_whose_tail_was_lost() -> None:
    state = parts()
    state["plateau"] = torch.optim.lr_scheduler.ReduceLROnPlateau(state["optimizer0"])
    for epoch in range(3):
        replay = Replay(state, lambda: None)  # a process that has begun since judges alike
        for step in range(3):
            replay.begin(4 * epoch + step)
            state["optimizer0"].step()
        replay.begin(4 * epoch + 3)
        state["optimizer0"].step()
        assert replay.back() is Quality.TAIL_LOST
        assert state["scheduler0"].last_epoch == epoch
        state["scheduler0"].step()
        state["plateau"].step(1.0)


def test_step_that_one_of_two_optimizers_made_is_torn() -> None:
    state = parts(optimizers=2)
    replay = Replay(state, lambda: None)
    replay.begin(0)
    forward(state)
    state["optimizer1"].step()
    assert replay.back() is Quality.TORN


def test_optimizer_does_not_step_in_a_round_that_is_over() -> None:
    class Over(RuntimeError):
        pass

    def refuse() -> None:
        raise Over

    state = parts()
    replay = Replay(state, refuse)
    replay.begin(0)
    forward(state)
    before = [p.detach().clone() for p in state["model"].parameters()]
    with pytest.raises(Over):
        state["optimizer0"].step()
    assert all(torch.equal(p, b) for p, b in zip(state["model"].parameters(), before, strict=True))
    assert replay.back() is Quality.WHOLE
    replay.end()
    state["optimizer0"].step()


def test_step_before_does_not_count_for_the_present_one() -> None:
    state = parts()
    replay = Replay(state, lambda: None)
    replay.begin(0)
    forward(state)
    state["optimizer0"].step()
    state["scaler"].update()
    replay.begin(0)
    forward(state)
    assert replay.back() is Quality.WHOLE
