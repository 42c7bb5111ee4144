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
    state["model"].zero_grad()
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


def ordinary(state: dict[str, Any], replay: Replay, step: int) -> None:
    """A step up to its first collective behind the optimizer."""
    replay.begin(step)
    forward(state)
    state["scaler"].step(state["optimizer0"])
    state["scaler"].update()
    state["seen"]["n"].append(step)
    replay.collective("allreduce", [torch.zeros(2)])


def lost(replay: Replay) -> Quality:
    """The step in hand fails."""
    return Quality.TAIL_LOST if replay.counts() else replay.back()


def test_step_that_failed_before_its_optimizer_leaves_no_trace_and_repeats_to_the_same_bits() -> None:
    state = parts()
    replay = Replay(state, lambda: None)
    replay.begin(0)
    before = contents(state)
    first = forward(state)
    state["scaler"].update(9.0)
    state["seen"]["n"].append(2)
    state["optimizer0"].param_groups[0]["lr"] = 7.0
    random.random()
    assert lost(replay) is Quality.WHOLE
    assert same(contents(state), before)
    assert state["optimizer0"].param_groups[0]["lr"] == 0.1
    assert all(p.grad is None for p in state["model"].parameters())
    assert torch.equal(forward(state), first)


def test_step_that_had_made_all_that_a_step_makes_counts_and_its_schedule_moves_once() -> None:
    for scheduled in (False, True):
        state = parts()
        replay = Replay(state, lambda: None)
        for step in range(3):
            ordinary(state, replay, step)
            state["scheduler0"].step()
            replay.ended()
        ordinary(state, replay, 3)
        if scheduled:
            state["scheduler0"].step()
        moved = [p.detach().clone() for p in state["model"].parameters()]
        assert lost(replay) is Quality.TAIL_LOST
        assert all(torch.equal(p, m) for p, m in zip(state["model"].parameters(), moved, strict=True))
        assert state["scheduler0"].last_epoch == 4
        assert state["optimizer0"].param_groups[0]["lr"] == pytest.approx(1e-5)


def test_step_of_a_process_that_has_seen_none_to_its_end_is_torn_once_its_optimizer_has_begun() -> None:
    state = parts()
    replay = Replay(state, lambda: None)
    ordinary(state, replay, 0)
    assert lost(replay) is Quality.TORN
    assert "no step of this process was seen to its end" in replay.torn


def test_chained_schedule_moves_though_a_peer_was_lost_before_it_did() -> None:
    state = parts()
    state["scheduler0"] = torch.optim.lr_scheduler.ChainedScheduler([state["scheduler0"]])
    replay = Replay(state, lambda: None)
    for step in range(3):
        ordinary(state, replay, step)
        state["scheduler0"].step()
        replay.ended()
    ordinary(state, replay, 3)
    assert lost(replay) is Quality.TAIL_LOST
    assert state["optimizer0"].param_groups[0]["lr"] == pytest.approx(1e-5)


def test_schedule_of_epochs_does_not_move_with_a_step_whose_tail_was_lost() -> None:
    state = parts()
    state["plateau"] = torch.optim.lr_scheduler.ReduceLROnPlateau(state["optimizer0"])
    replay = Replay(state, lambda: None)
    for epoch in range(3):
        for step in range(3):
            ordinary(state, replay, 4 * epoch + step)
            replay.ended()
        ordinary(state, replay, 4 * epoch + 3)
        # Until it has moved it is not known that it does so after the block.
        if epoch == 0:
            replay.ended()
        else:
            assert lost(replay) is Quality.TAIL_LOST
        assert state["scheduler0"].last_epoch == epoch
        state["scheduler0"].step()
        state["plateau"].step(1.0)


def test_step_that_one_of_two_optimizers_made_is_torn() -> None:
    state = parts(optimizers=2)
    replay = Replay(state, lambda: None)
    for step in range(3):
        replay.begin(step)
        forward(state)
        state["optimizer1"].step()
        state["scaler"].update()
        if step < 2:
            state["optimizer0"].step()
            replay.ended()
    assert lost(replay) is Quality.TORN
    assert "optimizer1" in replay.torn


@pytest.mark.parametrize("closure", [True, False], ids=["in-its-step", "moved-by-hand"])
def test_state_that_moves_before_the_optimizer_has_stepped_is_torn(closure: bool) -> None:
    state = parts()
    replay = Replay(state, lambda: None)
    replay.begin(0)

    def fails() -> float:
        raise ConnectionError

    if closure:
        with pytest.raises(ConnectionError):
            state["optimizer0"].step(fails)
    else:
        with torch.no_grad():
            state["model"][0].weight.add_(1)
    assert lost(replay) is Quality.TORN
    assert ("optimizer0" if closure else "model") in replay.torn


def test_parameter_that_a_collective_writes_into_is_not_put_back() -> None:
    state = parts()
    replay = Replay(state, lambda: None)
    replay.begin(0)
    replay.collective("broadcast", [state["model"][0].weight.data])
    assert lost(replay) is Quality.TORN


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
    assert replay.refused == 1
    assert all(torch.equal(p, b) for p, b in zip(state["model"].parameters(), before, strict=True))
    assert lost(replay) is Quality.WHOLE
    replay.end()
    state["optimizer0"].step()


def test_step_before_does_not_count_for_the_present_one() -> None:
    state = parts()
    replay = Replay(state, lambda: None)
    ordinary(state, replay, 0)
    replay.ended()
    replay.begin(1)
    forward(state)
    assert lost(replay) is Quality.WHOLE


def test_buffers_that_forward_replaced_are_the_ones_of_the_beginning_again() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("grows", torch.ones(1))
    before = model.grows
    replay = Replay({"model": model}, lambda: None)
    replay.begin(0)
    model.grows = torch.cat([model.grows, torch.ones(1)])
    model.register_buffer("late", torch.ones(1))
    assert lost(replay) is Quality.WHOLE
    assert model.grows is before
    assert list(model._buffers) == ["grows"]


def test_gradients_are_zeros_where_there_were_some_and_none_where_there_were_none() -> None:
    state = parts()
    replay = Replay(state, lambda: None)
    (first, *others) = state["model"].parameters()
    first.grad = torch.zeros_like(first)
    replay.begin(0)
    forward(state)
    assert lost(replay) is Quality.WHOLE
    assert not first.grad.any()
    assert all(p.grad is None for p in others)


def test_step_that_failed_while_layers_were_frozen_or_in_evaluation_begins_as_it_began_before() -> None:
    """As a script does that freezes one network while another learns, and thaws it at the step's end."""
    state = parts()
    model = state["model"]
    model[0].bias.requires_grad_(False)
    replay = Replay(state, lambda: None)
    replay.begin(0)
    model.eval()
    model[1].requires_grad_(False)
    model[0].bias.requires_grad_(True)
    assert lost(replay) is Quality.WHOLE
    assert all(m.training for m in model.modules())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["0.bias"]


def test_step_that_was_lost_in_an_evaluation_at_its_end_does_not_count() -> None:
    """What follows it would be trained without dropout."""
    state = parts()
    replay = Replay(state, lambda: None)
    for step in range(4):
        ordinary(state, replay, step)
        state["model"].eval()
        replay.collective("allreduce", [torch.zeros(3)])
        state["model"].train()
        replay.ended()
    ordinary(state, replay, 4)
    state["model"].eval()
    replay.collective("allreduce", [torch.zeros(3)])
    assert lost(replay) is Quality.TORN
    assert all(m.training for m in state["model"].modules())
