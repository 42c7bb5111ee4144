"""Tensors that require a gradient are filled in place."""

from typing import Any

import torch
from torch import nn

import everstep
from everstep.storage import MemoryStore


def saved(state: dict[str, Any]) -> MemoryStore:
    store = MemoryStore()
    with everstep.Checkpointer(store=store, on_event=lambda kind, **_: None) as run:
        run.restore({})
        run.save(5, state)
    return store


def test_tensors_that_require_a_gradient_are_filled_in_place() -> None:
    def state(number: float) -> dict[str, Any]:
        deep = {"list": [torch.full((2,), number, requires_grad=True)], "parameter": nn.Parameter(torch.tensor(number))}
        alpha = torch.full((1,), number, requires_grad=True)
        return {"log_alpha": alpha, "bare": nn.Parameter(torch.full((2,), number)), "deep": deep}

    def tensors(of: dict[str, Any]) -> list[torch.Tensor]:
        return [of["log_alpha"], of["bare"], of["deep"]["list"][0], of["deep"]["parameter"]]

    store, into = saved(state(1.0)), state(0.0)
    ours = tensors(into)
    everstep.load(store=store, state=into)
    assert all(now is then for now, then in zip(tensors(into), ours, strict=True))
    assert all(t.requires_grad and t.is_leaf and bool((t == 1).all()) for t in ours)
    wide = {"log_alpha": torch.zeros(1, dtype=torch.float64, requires_grad=True)}
    everstep.load(store=store, state=wide, cast=True)
    assert wide["log_alpha"].tolist() == [1]
    assert wide["log_alpha"].requires_grad
