"""An optimizer's state goes by the names of its parameters, so another order or grouping of them loses nothing."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from everstep.checkpoint import StateMismatch
from everstep.checkpoint.state.named import by_name, by_number, names_of, numbered


def network(seed: int) -> torch.nn.ModuleDict:
    torch.manual_seed(seed)
    return torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3), "c": torch.nn.LayerNorm(3)})


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(number + 1))
    optimizer.step()


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.AdamW(p, lr=0.3, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.2), capturable=False, foreach=False),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_optimizer_whose_parameters_come_in_another_order_gets_the_state_of_each(kind: str) -> None:
    saved, loaded = network(1), network(2)
    first = MAKERS[kind](saved.parameters())
    stepped(saved, first)
    tree = copy.deepcopy(by_name(first, names_of({"m": saved}), "o"))
    names = {id(p): name for name, p in loaded.named_parameters()}
    order = sorted(loaded.parameters(), key=lambda p: names[id(p)], reverse=True)
    second = MAKERS[kind](order)
    second.load_state_dict(by_number(second, names_of({"m": loaded}), "o", tree))
    for name, parameter in loaded.named_parameters():
        want, got = first.state[saved.get_parameter(name)], second.state[parameter]
        assert set(want) == set(got)
        assert all(torch.equal(want[k], got[k]) if torch.is_tensor(want[k]) else want[k] == got[k] for k in want), name
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"]


def test_groups_are_made_anew_of_the_options_that_each_parameter_had() -> None:
    saved, loaded = network(1), network(2)
    parts = [{"params": saved[k].parameters(), "lr": lr} for k, lr in (("a", 0.1), ("b", 0.2), ("c", 0.2))]
    first = torch.optim.AdamW(parts)
    stepped(saved, first)
    tree = copy.deepcopy(by_name(first, names_of({"m": saved}), "o"))
    regrouped: list[dict[str, Any]] = [
        {"params": [*loaded["b"].parameters(), *loaded["c"].parameters()]},
        {"params": loaded["a"].parameters()},
    ]
    second = torch.optim.AdamW(regrouped, lr=9.0)
    second.load_state_dict(by_number(second, names_of({"m": loaded}), "o", tree))
    assert [group["lr"] for group in second.param_groups] == [0.2, 0.1]
    assert torch.equal(second.state[loaded["c"].bias]["exp_avg"], first.state[saved["c"].bias]["exp_avg"])
    mixed = torch.optim.AdamW(loaded.parameters(), lr=9.0)
    with pytest.raises(StateMismatch, match=r"o: m\.b\.weight and m\.a\.weight are in one group.*another 'lr'"):
        by_number(mixed, names_of({"m": loaded}), "o", tree)


def test_parameter_without_a_name_or_without_state_in_the_commit_is_named() -> None:
    model, alien = network(1), torch.nn.Parameter(torch.ones(2, 5))
    names = names_of({"m": model})
    with pytest.raises(
        StateMismatch, match=re.escape("o: parameter 0 of group 1, of shape (2, 5), belongs to no module")
    ):
        numbered(torch.optim.SGD([{"params": [*model.parameters()]}, {"params": [alien]}]), names, "o")
    few = by_name(torch.optim.SGD(model["a"].parameters()), names, "o")
    with pytest.raises(StateMismatch, match=r"o: the commit has no optimizer state for the parameter 'm\.b\.weight'"):
        by_number(torch.optim.SGD(model.parameters()), names, "o", few)
    with pytest.raises(StateMismatch, match=r"m\.a\.weight: two parameters"):
        names_of({"m": model, "m.a": model["b"]})


def test_frozen_parameter_that_has_no_state_stays_without() -> None:
    model = network(1)
    optimizer = torch.optim.AdamW(model.parameters())
    model["a"].weight.grad = torch.ones(3, 3)
    optimizer.step()
    tree = by_name(optimizer, names_of({"m": model}), "o")
    assert list(tree["state"]) == ["m.a.weight"]
    assert set(tree["param_groups"]) == {f"m.{name}" for name, _ in model.named_parameters()}
    assert list(by_number(optimizer, names_of({"m": model}), "o", tree)["state"]) == [0]
