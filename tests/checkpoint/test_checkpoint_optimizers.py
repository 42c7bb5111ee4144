"""An optimizer that is loaded in part: each parameter gets its own state, or the report names it."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.checkpoint import StateMismatch
from support.checkpoint.saves import saved


def network(seed: int = 0, head: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(OrderedDict(body=nn.Linear(2, 2), head=nn.Linear(2, head)))


def stepped(parameters: Any) -> torch.optim.Optimizer:
    """Adam with moments that differ from parameter to parameter."""
    given = list(parameters)
    optimizer = torch.optim.Adam(given)
    for number, parameter in enumerate(given):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return optimizer


def moment(optimizer: torch.optim.Optimizer, parameter: Any) -> list[float]:
    found: list[float] = optimizer.state[parameter]["exp_avg"].flatten().tolist()
    return found


@pytest.mark.parametrize("options", [{"include": ["optimizer"]}, {"exclude": ["model"]}, {"exclude": ["model/*"]}])
def test_optimizer_alone_is_loaded_by_the_names_of_its_parameters(options: Any) -> None:
    model = network()
    store = saved({"model": model, "optimizer": (optimizer := stepped(model.parameters()))})
    into = network(1)
    before = [t.clone() for t in into.state_dict().values()]
    fresh = torch.optim.Adam(reversed(list(into.parameters())))
    report = everstep.load(store=store, state={"model": into, "optimizer": fresh}, **options).report
    for one, other in zip(model.parameters(), into.parameters(), strict=True):
        assert moment(optimizer, one) == moment(fresh, other)
    assert all(torch.equal(a, b) for a, b in zip(before, into.state_dict().values(), strict=True))
    assert not any(path.startswith("optimizer") for path in report.not_taken)
    assert report.missing == report.mismatched == ()


def test_parameters_of_a_part_that_is_left_out_keep_their_state() -> None:
    model = network()
    store = saved({"model": model, "optimizer": (optimizer := stepped(model.parameters()))})
    into = network(1)
    fresh = torch.optim.Adam(into.parameters())
    report = everstep.load(store=store, state={"model": into, "optimizer": fresh}, exclude=["model/head"]).report
    assert moment(fresh, into.body.weight) == moment(optimizer, model.body.weight)  # type: ignore[union-attr]
    assert into.head.weight not in fresh.state  # type: ignore[union-attr,comparison-overlap]
    assert {"optimizer/model/head.weight", "optimizer/model/head.bias"} < set(report.not_taken)
    # The optimizer holds only the head, and of the model only the body is taken.
    tail = stepped(model.head.parameters())  # type: ignore[union-attr]
    store = saved({"model": model, "optimizer": tail})
    small = torch.optim.Adam(into.head.parameters())  # type: ignore[union-attr]
    state = {"model": into, "optimizer": small}
    report = everstep.load(store=store, state=state, include=["optimizer", "model/body"]).report
    assert not small.state
    assert {"optimizer/model/head.weight", "optimizer/model/head.bias"} < set(report.not_taken)


@pytest.mark.parametrize("place", ["key", "dict", "list"])
def test_loose_parameter_has_a_name_so_that_the_order_may_change(place: str) -> None:
    def state(first: bool) -> tuple[nn.Module, nn.Parameter, torch.optim.Optimizer, dict[str, Any]]:
        model, loose = nn.Linear(2, 1, bias=False), nn.Parameter(torch.zeros(1, 2))
        order = [loose, model.weight] if first else [model.weight, loose]
        held: Any = {"key": loose, "dict": {"scale": loose}, "list": [1, loose]}[place]
        optimizer = stepped(order)
        return model, loose, optimizer, {"model": model, "extra": held, "optimizer": optimizer}

    model, loose, optimizer, given = state(False)
    store = saved(given)
    again, other, fresh, into = state(True)
    assert moment(fresh, other) != moment(optimizer, loose)
    run = everstep.Checkpointer(store=store, on_event=lambda kind, **_: None)
    run.restore(into)
    assert moment(fresh, again.weight) == moment(optimizer, model.weight)
    assert moment(fresh, other) == moment(optimizer, loose)
    split = torch.optim.Adam([{"params": [other]}, {"params": [again.weight]}])  # type: ignore[arg-type]
    everstep.load(store=store, state={**into, "optimizer": split})
    assert moment(split, other) == moment(optimizer, loose)


def test_renamed_model_that_the_optimizer_lacks_is_refused_unless_a_part_will_do() -> None:
    model = network()
    store = saved({"model": model, "optimizer": stepped(model.head.parameters())})  # type: ignore[union-attr]
    into = network(1)
    before = [t.clone() for t in into.state_dict().values()]
    fresh = torch.optim.Adam(into.parameters())
    state = {"net": into, "optimizer": fresh}
    with pytest.raises(StateMismatch, match=r"optimizer/net/body\.weight is in the state passed and not in the commit"):
        everstep.load(store=store, state=state, rename={"model": "net"})
    assert all(torch.equal(a, b) for a, b in zip(before, into.state_dict().values(), strict=True))
    report = everstep.load(store=store, state=state, rename={"model": "net"}, strict=False).report
    assert report.missing == ("optimizer/net/body.weight", "optimizer/net/body.bias")
    less = torch.optim.Adam([into.head.weight])  # type: ignore[arg-type, list-item, union-attr]
    with pytest.raises(StateMismatch, match=r"optimizer/net/head\.bias is in the commit and not in the state passed"):
        everstep.load(store=store, state={"net": into, "optimizer": less}, rename={"model": "net"})


def test_groups_whose_options_disagree_are_refused_where_what_is_taken_must_fit() -> None:
    model = network()
    two = torch.optim.Adam([{"params": model.body.parameters(), "lr": 1.0}, {"params": model.head.parameters()}])  # type: ignore[union-attr]
    store = saved({"model": model, "optimizer": two})
    into = network(1)
    one = torch.optim.Adam(into.parameters(), lr=0.5)
    with pytest.raises(StateMismatch, match="are in one group, and the commit has another 'lr' for each"):
        everstep.load(store=store, state={"net": into, "optimizer": one}, rename={"model": "net"})
    everstep.load(store=store, state={"net": into, "optimizer": one}, rename={"model": "net"}, strict=False)
    assert one.param_groups[0]["lr"] == 0.5


def test_state_that_a_parameter_had_is_not_kept_where_the_commit_has_none_for_it() -> None:
    model = network()
    model.body.requires_grad_(False)  # type: ignore[union-attr]
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    store = saved({"model": model, "optimizer": optimizer})
    into = network(1)
    full = stepped(into.parameters())
    everstep.load(store=store, state={"model": into, "optimizer": full}, strict=False)
    assert into.body.weight not in full.state  # type: ignore[union-attr,comparison-overlap]
    assert moment(full, into.head.weight) == moment(optimizer, model.head.weight)  # type: ignore[union-attr]


class Own(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def test_optimizer_that_reads_by_number_is_refused_if_the_order_changed() -> None:
    def state(back: bool, seed: int) -> tuple[nn.Module, dict[str, Any]]:
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        optimizer = Own(list(model.parameters())[:: -1 if back else 1], lr=0.1, momentum=0.9)
        return model, {"model": model, "optimizer": optimizer}

    _, given = state(False, 0)
    store = saved(given)
    everstep.load(store=store, state=state(False, 1)[1])
    with pytest.raises(StateMismatch, match=r"optimizer: .*order"):
        everstep.load(store=store, state=state(True, 1)[1])
    report = everstep.load(store=store, state=state(True, 1)[1], strict=False).report
    assert report.mismatched[0].startswith("optimizer: ")
