"""A misfit is refused before anything is changed; a load that is asked for in part tells what it left out."""

from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import everstep
from everstep.checkpoint import CheckpointError, LoadReport, StateMismatch
from everstep.storage import MemoryStore
from support.checkpoint.saves import saved


def network(head: int = 3, layers: int = 2, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    body = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)], nn.BatchNorm1d(4))
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(4, head)))


def trained(model: nn.Module, kind: Any = torch.optim.Adam, parameters: Any = None) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(model.parameters() if parameters is None else parameters, lr=0.1)
    torch.manual_seed(7)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return optimizer


def values(*modules: nn.Module) -> list[torch.Tensor]:
    return [t.clone() for module in modules for t in module.state_dict().values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def refused(store: MemoryStore, state: dict[str, Any], text: str, *modules: nn.Module, **options: Any) -> None:
    """Both ways to load say what does not fit, and leave the modules as they were."""
    before = values(*modules)
    with pytest.raises(StateMismatch, match=text):
        everstep.load(store=store, state=state, **options)
    with pytest.raises(StateMismatch, match=text):
        everstep.Checkpointer(store=store, on_event=lambda kind, **_: None).restore(state, **options)
    assert same(values(*modules), before)


# The first module fits, and comes first: it must not be filled either.
@pytest.mark.parametrize(
    ("other", "text"),
    [
        (network(head=5), r"b/head.weight: shape \(3, 4\) in the commit, \(5, 4\) in the state passed"),
        (network(layers=3), "b/body.3.weight is in the state passed and not in the commit"),
        (network(layers=1), "b/body.2.weight is in the commit and not in the state passed"),
        (network().half(), "b/body.0.weight: F32 in the commit, F16 in the state passed"),
    ],
)
def test_module_that_does_not_fit_changes_nothing(other: nn.Module, text: str) -> None:
    store = saved({"a": network(), "b": network()})
    first = network(seed=1)
    refused(store, {"a": first, "b": other}, text, first, other)


def test_tensor_of_another_type_is_converted_only_if_asked_for() -> None:
    store = saved({"model": network(), "t": torch.arange(3.0)})
    half, whole = network(seed=1).to(torch.bfloat16), torch.zeros(3, dtype=torch.float64)
    refused(store, {"model": network(seed=1), "t": whole}, "t: F32 in the commit, F64", half)
    refused(store, {"t": torch.zeros(4)}, r"t: shape \(3,\) in the commit, \(4,\)")
    everstep.load(store=store, state={"model": half, "t": whole}, cast=True)
    assert same(values(half), values(network().to(torch.bfloat16)))
    assert whole.tolist() == [0, 1, 2]


def test_state_of_an_optimizer_keeps_its_type() -> None:
    model = network()
    optimizer = trained(model)
    model.to(torch.bfloat16)  # the moments stay float32
    store = saved({"model": model, "optimizer": optimizer})
    again = network().to(torch.bfloat16)
    fresh = torch.optim.Adam(again.parameters(), lr=0.1)
    everstep.load(store=store, state={"model": again, "optimizer": fresh})
    for one, other in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert one["exp_avg"].dtype == other["exp_avg"].dtype == torch.float32
        assert torch.equal(one["exp_avg"], other["exp_avg"])


@pytest.mark.parametrize("backwards", [False, True])
def test_state_dict_and_module_are_the_same_thing(backwards: bool) -> None:
    model, into = network(), network(seed=1)
    store = saved({"model": model if backwards else dict(model.state_dict())})
    everstep.load(store=store, state={"model": dict(into.state_dict()) if backwards else into})
    assert same(values(into), values(model))
    other = network(head=5)
    refused(store, {"model": dict(other.state_dict()) if backwards else other}, "model/head.weight: shape", other)


def test_another_optimizer_is_refused_by_name() -> None:
    model = network()
    store = saved({"model": model, "optimizer": trained(model)})
    other = network(seed=1)
    momentum = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    refused(store, {"model": other, "optimizer": momentum}, "optimizer: .* Adam, the state passed in SGD", other)
    refused(store, {"model": other, "optimizer": momentum}, "Adam", other, strict=False)
    everstep.load(store=store, state={"model": other, "optimizer": momentum}, exclude=["optimizer"])
    assert same(values(other), values(model))


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters() if p in optimizer.state}


def test_order_of_parameters_may_change_and_nothing_is_swapped() -> None:
    # body.0 and body.1 have the same shapes: by numbers their state would be swapped in silence.
    model = network()
    optimizer = trained(model)
    store = saved({"model": model, "optimizer": optimizer})
    for full in (False, True):
        other = network(seed=1)
        order = list(other.parameters())[::-1]
        changed = trained(other, parameters=order) if full else torch.optim.Adam(order, lr=0.5)
        everstep.load(store=store, state={"model": other, "optimizer": changed})
        right = moments(model, optimizer)
        assert moments(other, changed).keys() == right.keys()
        assert all(torch.equal(t, right[n]) for n, t in moments(other, changed).items())
        assert changed.param_groups[0]["lr"] == 0.1


def test_groups_may_change_if_the_options_agree() -> None:
    model = network()
    optimizer = trained(model)
    store = saved({"model": model, "optimizer": optimizer})
    other = network(seed=1)
    groups = [{"params": list(other.head.parameters())}, {"params": list(other.body.parameters())}]  # type: ignore[union-attr]
    changed = torch.optim.Adam(groups, lr=0.1)
    everstep.load(store=store, state={"model": other, "optimizer": changed})
    right = moments(model, optimizer)
    assert all(torch.equal(t, right[n]) for n, t in moments(other, changed).items())
    one = saved({"model": other, "optimizer": changed})
    back = torch.optim.Adam(model.parameters(), lr=0.1)
    everstep.load(store=one, state={"model": model, "optimizer": back})
    assert all(torch.equal(t, right[n]) for n, t in moments(model, back).items())
    changed.param_groups[0]["lr"] = 0.01
    two = saved({"model": other, "optimizer": changed})
    third = network(seed=2)
    refused(two, {"model": third, "optimizer": torch.optim.Adam(third.parameters())}, "another 'lr' for each", third)


def test_optimizer_without_its_module_needs_the_same_groups() -> None:
    model = network()
    store = saved({"optimizer": trained(model)})
    fewer = torch.optim.Adam(list(model.parameters())[:3])
    refused(store, {"optimizer": fewer}, r"groups of \[8\] parameters in the commit", model)


def test_optimizer_of_other_parameters_is_refused_by_their_names() -> None:
    model = network()
    store = saved({"model": model, "optimizer": trained(model)})
    fewer = torch.optim.Adam(model.head.parameters())  # type: ignore[union-attr]
    refused(
        store, {"model": model, "optimizer": fewer}, "model/body.0.bias is in the optimizer of the commit only", model
    )


def test_new_head_and_a_new_key_keep_what_they_have() -> None:
    model = network()
    optimizer = trained(model)
    store = saved({"model": model, "optimizer": optimizer, "old": 1})
    other = network(head=5, seed=1)
    changed = trained(other)
    head, momentum = values(other.head), changed.state[other.head.weight]["exp_avg"].clone()  # type: ignore[arg-type,union-attr]
    state = {"model": other, "optimizer": changed, "ema": 3}
    loaded = everstep.load(store=store, state=state, strict=False)
    assert same(values(other.body), values(model.body))  # type: ignore[arg-type]
    assert same(values(other.head), head)  # type: ignore[arg-type]
    assert torch.equal(changed.state[other.head.weight]["exp_avg"], momentum)  # type: ignore[union-attr]
    assert torch.equal(moments(other, changed)["body.0.weight"], moments(model, optimizer)["body.0.weight"])
    assert state["ema"] == 3
    assert loaded.report.missing == ("ema",)
    assert set(loaded.report.mismatched) == {
        "model/head.weight: shape (3, 4) in the commit, (5, 4) in the state passed",
        "model/head.bias: shape (3,) in the commit, (5,) in the state passed",
        "optimizer/model/head.weight", "optimizer/model/head.bias",
    }  # fmt: skip
    assert "old" in loaded.report.not_taken
    run = everstep.Checkpointer(store=store, on_event=lambda kind, **_: None)
    assert run.restore(state, strict=False) == 5
    assert run.report == loaded.report
    model_again = network(seed=3)
    assert run.restore({"model": model_again}, strict=False) == 5
    assert run.report == LoadReport(not_taken=("optimizer", "old"))


def test_fewer_and_more_layers() -> None:
    model = network(layers=3)
    store = saved({"model": model.body})
    fewer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    report = everstep.load(store=store, state={"model": fewer}, strict=False).report
    assert torch.equal(fewer[1].weight, model.body[1].weight)  # type: ignore[index,union-attr,arg-type]
    assert report.not_taken[:2] == ("model/2.weight", "model/2.bias")
    assert report.missing == ()


def test_include_exclude_and_rename() -> None:
    model = network()
    store = saved({"ema": nn.ModuleDict({"module": model}), "model": network(seed=5), "epoch": 3})
    into = network(seed=1)
    before = values(into.head)  # type: ignore[arg-type]
    report = everstep.load(
        store=store, state={"model": into, "epoch": 0}, rename={"model": "old", "ema/module": "model"},
        exclude=["model/head", "epoch"],
    ).report  # fmt: skip
    assert same(values(into.body), values(model.body))  # type: ignore[arg-type]
    assert same(values(into.head), before)  # type: ignore[arg-type]
    assert set(report.not_taken) == {"model/head.weight", "model/head.bias", "old", "epoch"}
    only = network(seed=2)
    everstep.load(store=store, state={"ema": nn.ModuleDict({"module": only})}, include=["ema/module.*.0.*"])
    assert torch.equal(only.body[0].weight, model.body[0].weight)  # type: ignore[index,union-attr,arg-type]
    assert not torch.equal(only.body[1].weight, model.body[1].weight)  # type: ignore[index,union-attr,arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"exclude": ["model/haed"]}, "exclude: 'model/haed' fits nothing"),
        ({"include": ["modle"]}, "include: 'modle' fits nothing"),
        ({"rename": {"enc": "model"}}, "rename: the commit has no 'enc'"),
        ({"rename": {"ema": "model"}}, "are both to be|is to be"),
    ],
)
def test_misspelt_selection_is_refused(options: dict[str, Any], text: str) -> None:
    store = saved({"model": network(), "ema": network()})
    into = network(seed=1)
    refused(store, {"model": into}, text, into, **options)


def test_selection_is_lists_and_needs_a_state() -> None:
    store = saved({"a": 1})
    with pytest.raises(CheckpointError, match=r"exclude='a': a list of paths is expected, \['a'\]"):
        everstep.load(store=store, state={"a": 0}, exclude="a")
    with pytest.raises(CheckpointError, match="are for a load into a state"):
        everstep.load(store=store, strict=False)


def test_dict_keeps_what_the_commit_does_not_have() -> None:
    store = saved({"seen": {"a": 1, "deep": {"x": 1}}})
    state = {"seen": {"a": 0, "b": 2, "deep": {"y": 5}}}
    report = everstep.load(store=store, state=state, strict=False).report
    assert state == {"seen": {"a": 1, "b": 2, "deep": {"x": 1, "y": 5}}}
    assert report.missing == ("seen/b",)
    everstep.load(store=store, state=state)
    assert state == {"seen": {"a": 1, "deep": {"x": 1}}}


class Pair(NamedTuple):
    one: Any
    two: Any


def test_containers_keep_the_type_that_the_state_has() -> None:
    def state(number: int) -> dict[str, Any]:
        deep = {"o": OrderedDict(a=[number], b=(number, torch.full((2,), float(number)))), "n": np.int64(number)}
        return {"pair": Pair(number, torch.full((2,), float(number))), "np": np.float32(number / 3), "deep": deep}

    store = saved(state(1))
    into = state(0)
    ours = into["pair"].two, into["deep"]["o"]["b"][1]
    everstep.load(store=store, state=into)
    right = state(1)
    assert (type(into["pair"]), into["pair"].one, into["pair"].two.tolist()) == (Pair, 1, [1, 1])
    assert (type(into["np"]), into["np"]) == (np.float32, right["np"])
    assert (type(into["deep"]["o"]), type(into["deep"]["n"])) == (OrderedDict, np.int64)
    assert [t.tolist() for t in ours] == [[1, 1], [1, 1]], "what the script has names for is filled in place"
    assert type(everstep.load(store=store).state["pair"]) is tuple


def test_going_back_and_on(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.zeros(2), "step": 0}
    with everstep.Checkpointer(str(tmp_path), on_event=lambda kind, **_: None, keep=10) as run:
        run.restore(state)
        for step in (1, 2, 3):
            state["w"].fill_(step)
            run.save(step, state)
        assert run.restore(state, step=1) == 1
        assert state["w"].tolist() == [1, 1]
        with pytest.raises(
            CheckpointError, match=r"save\(0\) after step 1 was saved or restored.*restore\(state, step=…\)"
        ):
            run.save(0, state)
        state["w"].fill_(20)
        run.save(2, state).wait(30)
        found = run.latest()
        assert found is not None
        assert (found.step, found.n) == (2, 4)
        assert run.restore(state) == 2
        assert state["w"].tolist() == [20, 20]
        with pytest.raises(CheckpointError, match="no commit of step 7; there are steps 2, 3, 2, 1"):
            run.restore(state, step=7)
    assert everstep.Checkpointer(str(tmp_path), on_event=lambda kind, **_: None).restore(state) == 2


class Scaled(torch.nn.Linear):
    """Its extra state is a tensor, empty before the first step, as that of modules that compute in FP8."""

    amax: tuple[int, ...] = ()

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.amax, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.amax = tuple(state.tolist())


def test_extra_state_of_another_size_is_the_modules_own_to_judge() -> None:
    module = Scaled(2, 2)
    module.amax = (3, 5, 8)
    fresh = Scaled(2, 2)
    assert everstep.Checkpointer(store=saved({"model": module})).restore({"model": fresh}) == 5
    assert fresh.amax == (3, 5, 8)
    assert torch.equal(fresh.weight, module.weight)


WEIGHTS = {"model/body.0.weight", "model/body.1.weight", "model/body.2.weight", "model/head.weight"}
HEAD = {"model/head.weight", "model/head.bias"}


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        ("*.weight", WEIGHTS),
        ("model/*.weight", WEIGHTS),
        ("*head*", HEAD),
        ("**/head.*", HEAD),
        ("*/head.weight", {"model/head.weight"}),
        ("mod?l/head.weight", {"model/head.weight"}),
    ],
)
def test_wildcard_fits_whole_paths_key_included(pattern: str, taken: set[str]) -> None:
    model, into = network(), network(seed=1)
    into.body[2].weight.data.fill_(2)  # type: ignore[index,union-attr]
    store = saved({"model": model, "epoch": 3})
    before = {f"model/{name}": t.clone() for name, t in into.state_dict().items()}
    state = {"model": into, "epoch": 0}
    report = everstep.load(store=store, state=state, include=[pattern]).report
    right = {f"model/{name}": t for name, t in model.state_dict().items()}
    for name, tensor in into.state_dict().items():
        assert torch.equal(tensor, (right if f"model/{name}" in taken else before)[f"model/{name}"]), name
    assert state["epoch"] == 0
    assert set(report.not_taken) == set(right) - taken | {"epoch"}


def test_wildcard_in_exclude_leaves_what_it_does_not_fit() -> None:
    model, into = network(), network(seed=1)
    head = into.head.weight.clone()  # type: ignore[union-attr,operator]
    everstep.load(store=saved({"model": model}), state={"model": into}, exclude=["*.weight"])
    assert torch.equal(into.head.bias, model.head.bias)  # type: ignore[union-attr,arg-type]
    assert torch.equal(into.head.weight, head)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("pattern", ["mod?l", "*l", "ema", "*.wieght", "ema/*"])
def test_include_that_would_load_nothing_is_refused(pattern: str) -> None:
    into = network(seed=1)
    store = saved({"model": network(), "ema": network()})
    refused(store, {"model": into}, "include: .* fits nothing in the state passed, which has model/body", into,
            include=["model/head", pattern])  # fmt: skip


def test_empty_include_is_refused() -> None:
    with pytest.raises(CheckpointError, match="would load nothing: name what to take"):
        everstep.load(store=saved({"a": 1}), state={"a": 0}, include=[])


def test_moments_without_names_are_not_given_to_a_parameter_of_another_shape() -> None:
    weight, bias = (nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (2,)))
    optimizer = torch.optim.AdamW([weight, bias])
    weight.grad, bias.grad = torch.ones(2, 3), torch.ones(2)
    optimizer.step()
    store = saved({"optimizer": optimizer})
    turned = torch.optim.AdamW([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 3))])
    with pytest.raises(StateMismatch, match=r"optimizer: exp_avg.* of parameter 0 has shape \(2, 3\).*modules"):
        everstep.load(store=store, state={"optimizer": turned})
    assert not turned.state
    same = torch.optim.AdamW([nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))])
    everstep.load(store=store, state={"optimizer": same})
    assert len(same.state) == 2
