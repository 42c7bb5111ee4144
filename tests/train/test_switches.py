"""Frozen layers, modes and buffers that grow come to another process with the state."""

from typing import Any

import pytest
import torch

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.state.capture import apply, capture
from everstep.recovery.state.switches import SWITCHES, Switches


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
        self.register_buffer("means", torch.zeros(0))
        self.register_buffer("late", None)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


def script(*frozen: str) -> dict[str, Any]:
    """What a process holds when its loop begins."""
    model = Net()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    state: dict[str, Any] = {}
    state[SWITCHES] = Switches(state)
    state["model"] = model
    state[SWITCHES].start()
    return state


def hand_over(giver: dict[str, Any], receiver: dict[str, Any]) -> None:
    captured = capture(giver, 0)
    tensors = {name: t.clone() for name, t in captured.tensors.items()}
    apply(receiver, {"state": captured.values}, tensors, 1)


def switches(state: dict[str, Any]) -> Any:
    model = state["model"]
    return (
        {name: p.requires_grad for name, p in model.named_parameters()},
        {name: m.training for name, m in model.named_modules()},
        {name: b.tolist() for name, b in model.named_buffers() if name != "scratch"},
    )


@pytest.mark.parametrize("having", [(), ("first.weight",), ("first.weight", "norm.bias", "first.bias")])
def test_parameters_that_have_a_gradient_have_one_of_zeros_in_another_process(having: tuple[str, ...]) -> None:
    giver, receiver = script(), script()
    for name in having:
        giver["model"].get_parameter(name).grad = torch.ones_like(giver["model"].get_parameter(name))
    receiver["model"].norm.weight.grad = torch.ones(2)
    hand_over(giver, receiver)
    found = {name: p.grad for name, p in receiver["model"].named_parameters() if p.grad is not None}
    assert sorted(found) == sorted(having)
    assert not any(g.any() for g in found.values())


def test_what_was_switched_in_the_loop_comes_with_the_state() -> None:
    giver, receiver = script(), script()
    model = giver["model"]
    model.first.weight.requires_grad_(False)
    model.norm.eval()
    model.means = torch.tensor([1.0, 2.0])
    model.late = torch.tensor([[3], [4]])
    model.scratch = torch.zeros(5)
    hand_over(giver, receiver)
    assert switches(receiver) == switches(giver)
    assert receiver["model"].late.dtype == torch.int64
    assert receiver["model"].scratch.shape == (1,)


def test_a_state_of_before_the_switch_undoes_it() -> None:
    """As when all members go back to the last commit."""
    giver, receiver = script("first.bias"), script("first.bias")
    wanted = switches(giver)
    receiver["model"].first.requires_grad_(True)
    receiver["model"].eval()
    receiver["model"].means = torch.ones(3)
    hand_over(giver, receiver)
    assert switches(receiver) == wanted


def test_script_that_begins_otherwise_keeps_what_it_says(caplog: pytest.LogCaptureFixture) -> None:
    giver, receiver = script("first.weight"), script()
    giver["model"].first.requires_grad_(True)
    giver["model"].norm.eval()
    before = switches(receiver)[:2]
    hand_over(giver, receiver)
    assert switches(receiver)[:2] == before
    assert "model.first.weight" in caplog.text


def test_buffer_of_another_size_than_the_script_that_begins_otherwise_has_is_refused() -> None:
    giver, receiver = script("first.weight"), script()
    giver["model"].means = torch.ones(3)
    with pytest.raises(StateMismatch, match="size mismatch for means"):
        hand_over(giver, receiver)
