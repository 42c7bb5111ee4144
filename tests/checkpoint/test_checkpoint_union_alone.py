"""Unions in one process: trees are merged and taken apart, and optimizers go by name."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint import Fenced, StateMismatch
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.ranks import Alone
from everstep.checkpoint.state.holders import Holders, agreed
from everstep.checkpoint.state.tree import Flattener, unflatten
from everstep.checkpoint.state.union import merged, paths, pruned, unrequested
from everstep.storage import MemoryStore


def body(value: Any, kind: str = "value", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "tree": Flattener().flatten(value, "k"), **more}


def test_mappings_are_merged_by_their_keys_whatever_they_are_and_taken_apart_again() -> None:
    held: list[dict[Any, Any]] = [
        {"a": 1, "both": {"x": [1, (2, None)], 3: float("nan")}, "empty": {}},
        {4: "four", "both": {3: float("nan"), "x": [1, (2, None)], "$y": b"z"}, (1, 2): {"deep": {"er": True}}},
        {},
    ]
    union = merged([(rank, body(value)) for rank, value in enumerate(held)], "k")
    assert union["union"] is True  # type: ignore[index,call-overload]
    found = unflatten(union["tree"], {}, "k")  # type: ignore[index,call-overload]
    assert set(found) == {"a", "both", "empty", 4, (1, 2)}
    assert set(found["both"]) == {"x", 3, "$y"}
    for value in held[:1]:
        taken = unflatten(pruned(union["tree"], value, "k", 64), {}, "k")  # type: ignore[index,call-overload]
        assert repr(taken) == repr(value)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "k/a/b: rank 0 has 1, rank 3 has 2"),
        ({"a": [1, 2]}, {"a": [1]}, "k/a: rank 0 has [1, 2], rank 3 has [1]"),
        ({"a": 1}, {"a": {"b": 1}}, 'k/a: rank 0 has 1, rank 3 has {"b": 1}'),
        ({"a/b": True}, {"a/b": 1}, "k/a~1b: rank 0 has true, rank 3 has 1"),
        ({1: "x"}, {1: "y"}, 'k/1: rank 0 has "x", rank 3 has "y"'),
        ({1: "x"}, {"1": "x"}, 'k/1: the ranks hold the names "1" and 1, which are one in a commit'),
    ],
)
def test_value_that_two_ranks_hold_differently_is_named(one: Any, other: Any, words: str) -> None:
    with pytest.raises(StateMismatch, match=re.escape(words)):
        merged([(0, body(one)), (3, body(other))], "k")


def test_below_the_names_of_a_module_a_value_is_one_thing() -> None:
    with pytest.raises(StateMismatch, match=re.escape('k/a: rank 0 has {"x": 1}, rank 1 has {"y": 1}')):
        merged([(0, body({"a": {"x": 1}}, "module")), (1, body({"a": {"y": 1}}, "module"))], "k")
    with pytest.raises(StateMismatch, match="k: rank 0 holds a module, rank 1 a value"):
        merged([(0, body({}, "module")), (1, body({}))], "k")


def test_names_that_nobody_asks_for_are_told_unless_it_is_the_whole_key() -> None:
    saved = {"k": body({"a": 1, "b": {"c": 2, "d": 3}}), "other": body({"x": 1})}
    assert list(paths(saved["k"]["tree"], "k", 64)) == ["k/a", "k/b/c", "k/b/d"]
    assert unrequested(saved, ["k/a", "k/b/c", "k/b/d"]) is None
    assert (unrequested(saved, ["k/a"]) or "").startswith("k/b/c, k/b/d: in the commit, and no rank asks for it")


def test_ranks_that_hold_the_same_box_are_a_team() -> None:
    def whole(n: int) -> Any:
        return ["F32", [n], [[0], [n]]]

    def part(begin: int, size: int) -> Any:
        return ["F32", [4], [[begin], [size]]]

    told = [
        {"w": whole(4), "s": part(0, 2)}, {"s": part(2, 2)}, {"w": whole(4), "s": part(0, 2), "e": ["F32", [4], None]}
    ]  # fmt: skip
    assert agreed(told, 0) == {"w": (0, 2), "s": (0, 2)}
    assert agreed(told, 1) == {"s": (1,)}
    told[1]["s"] = part(1, 3)
    with pytest.raises(StateMismatch, match="s: its pieces hold 5 of 4 elements, and no other rank than 0, 1, 2 holds"):
        agreed(told, 0)
    told[1]["s"] = ["F64", [4], [[2], [2]]]
    with pytest.raises(StateMismatch, match=re.escape("s: rank 0 holds F32 (4,), rank 1 F64 (4,)")):
        agreed(told, 2)


@pytest.mark.parametrize(
    "target", [torch.ones(2), 3, [1], "text", everstep.Union({}), everstep.RngState()], ids=lambda t: type(t).__name__
)
def test_what_has_no_names_or_is_each_ranks_own_cannot_be_marked(target: Any) -> None:
    with pytest.raises(StateMismatch, match=r"everstep\.Union"):
        everstep.Union(target)


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    found = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    found[1].weight = found[0].weight
    return found


def optimizer(of: torch.nn.Module, *, turned: bool = False, steps: int = 0, **options: Any) -> torch.optim.Optimizer:
    parameters = list(of.parameters())
    found = torch.optim.Adam(parameters[::-1] if turned else parameters, lr=torch.tensor(0.1 * (1 + steps)), **options)
    for _ in range(steps):
        for number, parameter in enumerate(of.parameters()):
            parameter.grad = torch.full_like(parameter, float(number + 1))
        found.step()
    return found


def moments(of: torch.nn.Module, found: torch.optim.Optimizer) -> dict[str, list[float]]:
    return {name: found.state[p]["exp_avg"].flatten().tolist() for name, p in of.named_parameters()}


@pytest.mark.parametrize("marked", [True, False])
def test_optimizer_saved_by_name_is_read_in_another_order_with_the_mark_and_without(marked: bool) -> None:
    store = MemoryStore()
    saved, loaded = model(1), model(2)
    first, second = optimizer(saved, steps=2), optimizer(loaded, turned=True)
    with everstep.Checkpointer(store=store) as run:
        run.restore({"m": everstep.Union(saved), "o": everstep.Union(first)})
        run.save(1, {"m": everstep.Union(saved), "o": everstep.Union(first)}).wait(30)
    state = {"m": loaded, "o": second}
    if marked:
        state = {key: everstep.Union(value) for key, value in state.items()}  # type: ignore[misc]
    assert everstep.Checkpointer(store=store).restore(state) == 1
    assert moments(loaded, second) == moments(saved, first)
    assert float(second.param_groups[0]["lr"]) == pytest.approx(0.3)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters(), strict=True))
    assert loaded[0].weight is loaded[1].weight  # type: ignore[index]
    third = optimizer(loaded, steps=1)  # its tensors are there to be filled in place, and `lr` is one for all
    assert everstep.load(store=store, state={"m": loaded, "o": everstep.Union(third)}).step == 1
    assert moments(loaded, third) == moments(saved, first)


def test_optimizer_saved_by_number_is_not_read_by_name() -> None:
    store = MemoryStore()
    saved = model(1)
    with everstep.Checkpointer(store=store) as run:
        run.restore({"m": saved, "o": optimizer(saved, steps=1)})
        run.save(1, {"m": saved, "o": optimizer(saved, steps=1)}).wait(30)
    with pytest.raises(
        StateMismatch, match=r"o: the commit holds an optimizer's state by the numbers.*Restore it without"
    ):
        everstep.Checkpointer(store=store).restore({"m": saved, "o": everstep.Union(optimizer(saved))})


def test_commit_that_was_saved_whole_is_read_in_parts() -> None:
    store = MemoryStore()
    saved = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    with everstep.Checkpointer(store=store) as run:
        run.restore({"m": saved})
        run.save(1, {"m": saved}).wait(30)
    part = torch.nn.ModuleDict({"b": torch.nn.Linear(2, 2)})
    assert everstep.Checkpointer(store=store).restore({"m": everstep.Union(part)}) == 1
    assert torch.equal(part["b"].weight, saved["b"].weight)  # type: ignore[arg-type]


class Two(Alone):
    """Two ranks, threads of this process, that agree on numbers."""

    world_size = 2

    def __init__(self) -> None:
        self._all, self._told = threading.Barrier(2, timeout=60), list[int]()

    def maximum(self, value: int) -> int:
        self._told.append(value)
        self._all.wait()
        return max(self._told)


@pytest.mark.parametrize(
    ("problem", "other"), [(Fenced("a newer writer"), Fenced), (StateMismatch("lacks model"), CheckpointError)]
)
def test_rank_that_saves_nothing_ends_the_others_as_it_ends(problem: CheckpointError, other: type) -> None:
    ranks, state = Two(), {"model": everstep.Union({"a": torch.ones(2)})}

    def save(why: CheckpointError | None) -> type:
        holders = Holders()
        holders.unions = True
        with pytest.raises(CheckpointError) as raised:
            holders.capture(state, ranks, why)
        return raised.type

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(save, [problem, None])) == [type(problem), other]
