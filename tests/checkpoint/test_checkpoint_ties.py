"""Memory that is to get two values of a commit is refused by name, whether it is all of two tensors or a part."""

from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint import StateMismatch
from support.checkpoint.conversions import committed


@pytest.mark.parametrize("where", ["module", "tensors"])
def test_weights_that_are_tied_now_and_were_not_are_refused_by_name(where: str) -> None:
    class Two(torch.nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False)
            if tied:
                self.head.weight = self.embed.weight

    def state(tied: bool) -> dict[str, Any]:
        model = Two(tied)
        return {"m": model} if where == "module" else {"embed": model.embed.weight.data, "head": model.head.weight.data}

    into, apart = state(True), state(False)
    before = {k: v.clone() for k, v in (into["m"].state_dict() if where == "module" else into).items()}
    names = "m/embed.weight and m/head.weight" if where == "module" else "embed and head"
    store = committed(apart)
    with pytest.raises(StateMismatch, match=f"is tied in the state passed, and.* {names} with different"):
        everstep.load(store=store, state=into)
    assert all(torch.equal(before[k], v) for k, v in (into["m"].state_dict() if where == "module" else into).items())
    everstep.load(store=store, state=into, exclude=[names.rsplit(maxsplit=1)[-1]])
    if where == "module":
        assert torch.equal(into["m"].head.weight, apart["m"].embed.weight)
    equal = state(False)
    for tensor in equal["m"].parameters() if where == "module" else equal.values():
        tensor.data.fill_(3.0)
    everstep.load(store=committed(equal), state=into)  # two names for one value


@pytest.mark.parametrize("where", ["tensors", "module", "dict"])
def test_memory_that_overlaps_and_would_get_two_values_is_refused_by_name(where: str) -> None:
    def state(flat: torch.Tensor, other: torch.Tensor) -> dict[str, Any]:
        one, two = flat[:3], other[2:]
        if where == "module":
            module = torch.nn.Module()
            module.one, module.two = torch.nn.Parameter(one), torch.nn.Parameter(two)
            return {"m": module}
        return {"m/one": one, "m/two": {"in": [two]} if where == "dict" else two}

    apart, same = torch.arange(5.0), torch.ones(5)
    store, equal = committed(state(apart, apart + 1)), committed(state(same, same.clone()))
    into = torch.zeros(5)
    second = "m/two/in/0" if where == "dict" else "m/two"
    with pytest.raises(StateMismatch, match=f"^m/one and {second}: overlap in memory"):
        everstep.load(store=store, state=state(into, into))
    assert into.tolist() == [0] * 5
    everstep.load(store=equal, state=state(into, into))
    assert into.tolist() == [1] * 5
    everstep.load(store=store, state=state(into, torch.zeros(5)))
    assert into.tolist() == [0, 1, 2, 1, 1]


def test_memory_that_is_interleaved_holds_two_values() -> None:
    into = torch.zeros(6)
    store = committed({"a": torch.ones(3), "b": torch.full((3,), 2.0)})
    everstep.load(store=store, state={"a": into[::2], "b": into[1::2]})
    assert into.tolist() == [1, 2] * 3
