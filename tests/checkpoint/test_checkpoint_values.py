"""Tensors, arrays and enumerations in plain values come back as what the state has, or are refused by name."""

import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everstep
from everstep.checkpoint import StateMismatch
from everstep.storage import MemoryStore
from support.checkpoint.saves import saved

NESTED = "v/x"


@pytest.mark.parametrize(
    ("was", "now", "path", "text"),
    [
        (np.zeros(3), np.zeros(2), "v", r"shape \(3,\) in the commit, \(2,\)"),
        (np.zeros(3), np.zeros(3, dtype=np.float32), "v", "F64 in the commit, F32"),
        (np.zeros(()), np.zeros(1), "v", r"shape \(\) in the commit, \(1,\)"),
        (torch.zeros(1), torch.zeros(()), "v", r"shape \(1,\) in the commit, \(\)"),
        (torch.zeros(()), torch.zeros(1), "v", r"shape \(\) in the commit, \(1,\)"),
        ({"x": torch.zeros(3)}, {"x": torch.zeros(2)}, NESTED, r"shape \(3,\) in the commit, \(2,\)"),
        ({"x": torch.zeros(3)}, {"x": torch.zeros(3).half()}, NESTED, "F32 in the commit, F16"),
        ({"x": np.zeros(3)}, {"x": np.zeros((3, 1))}, NESTED, r"shape \(3,\) in the commit, \(3, 1\)"),
        ({"x": np.zeros(3)}, {"x": torch.zeros(3)}, NESTED, "an array in the commit, a tensor in the state"),
        ({"x": 1.0}, {"x": torch.zeros(3)}, NESTED, "no tensor in the commit, a tensor in the state"),
        ([1, (torch.zeros(3),)], [1, (torch.zeros(2),)], "v/1/0", r"shape \(3,\) in the commit, \(2,\)"),
        ({1: torch.zeros(3)}, {1: torch.zeros(2)}, "v/1", r"shape \(3,\) in the commit, \(2,\)"),
    ],
)
def test_tensor_or_array_of_another_form_is_refused_before_anything_is_changed(
    was: Any, now: Any, path: str, text: str
) -> None:
    model, into = nn.Linear(2, 2), nn.Linear(2, 2)
    store = saved({"model": model, "v": was})
    before = into.weight.detach().clone()
    with pytest.raises(StateMismatch, match=rf"{path}: {text}"):
        everstep.load(store=store, state={"model": into, "v": now})
    assert torch.equal(into.weight, before)


class OfSession:
    """What a session has among its objects: its script may keep what grows from step to step."""

    everstep_of_session = True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_session_takes_what_has_grown_since_its_script_began_and_no_other_type() -> None:
    store = saved({"kept": {"losses": torch.arange(3.0), "best": np.ones(2)}, "session": OfSession()})
    state: dict[str, Any] = {"kept": {"losses": torch.zeros(0), "best": np.zeros(0)}, "session": OfSession()}
    everstep.load(store=store, state=state)
    assert state["kept"]["losses"].tolist() == [0, 1, 2]
    assert state["kept"]["best"].tolist() == [1, 1]
    state["kept"]["losses"] = torch.zeros(0, dtype=torch.int64)
    everstep.load(store=store, state=state)  # of another size there is nothing that could be filled
    state["kept"]["losses"] = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(StateMismatch, match="kept/losses: F32 in the commit, I64"):
        everstep.load(store=store, state=state)


def test_none_in_its_place_takes_what_the_commit_has() -> None:
    store = saved({"grown": np.arange(3.0), "deep": {"x": torch.ones(3)}})
    state: dict[str, Any] = {"grown": None, "deep": {"x": None}}
    everstep.load(store=store, state=state)
    assert state["grown"].tolist() == [0, 1, 2]
    assert state["deep"]["x"].tolist() == [1, 1, 1]


def test_what_has_another_shape_is_kept_and_reported_where_a_part_will_do() -> None:
    store = saved({"a": np.ones(3), "d": {"w": torch.ones(3), "k": 1, "deep": {"x": torch.ones(3), "y": 1}}})
    state: dict[str, Any] = {
        "a": np.zeros(2),
        "d": {"w": torch.zeros(2), "k": 0, "deep": {"x": torch.zeros(2), "y": 0}},
    }
    report = everstep.load(store=store, state=state, strict=False).report
    assert state["a"].tolist() == [0, 0]  # type: ignore[attr-defined]
    assert state["d"]["w"].tolist() == [0, 0]
    assert (state["d"]["k"], state["d"]["deep"]["y"]) == (1, 0)
    assert [text.partition(":")[0] for text in report.mismatched] == ["a", "d/w", "d/deep/x"]
    assert report.not_taken == ("d/deep",)


def test_tensors_inside_dicts_are_converted_if_asked_for() -> None:
    store = saved({"d": {"w": torch.arange(3.0), "a": np.arange(3.0)}, "a": np.arange(3.0)})
    w, a = torch.zeros(3, dtype=torch.float64), np.zeros(3, dtype=np.float32)
    state = {"d": {"w": w, "a": a}, "a": (top := np.zeros(3, dtype=np.float32))}
    everstep.load(store=store, state=state, cast=True)
    assert state["d"]["w"] is w  # type: ignore[index,call-overload]
    assert w.tolist() == a.tolist() == top.tolist() == [0, 1, 2]


@pytest.mark.parametrize("where", ["module", "tensor", "dict", "optimizer"])
def test_number_that_a_conversion_would_lose_is_refused(where: str) -> None:
    big, model, into = torch.full((2, 2), 1e6), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False).half()
    optimizer, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(into.parameters())
    if where == "module":
        nn.init.constant_(model.weight, 1e6)
    model.weight.grad = big * 1e3
    optimizer.step()
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "module": ({"m": model}, {"m": into}),
        "tensor": ({"t": big}, {"t": big.half() * 0}),
        "dict": ({"d": {"t": big}}, {"d": {"t": torch.zeros((2, 2)).half()}}),
        "optimizer": ({"m": model, "o": optimizer}, {"m": into, "o": fresh}),
    }
    was, now = kinds[where]
    before = into.weight.detach().clone()
    with pytest.raises(StateMismatch, match=r"[mtdo](/.*)?: .* in F16"):
        everstep.load(store=saved(was), state=now, cast=True)
    assert torch.equal(into.weight, before)
    with pytest.raises(StateMismatch, match=r"in F16"):
        everstep.Checkpointer(store=saved(was), on_event=lambda kind, **_: None).restore(now, cast=True)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (torch.tensor([1.5]), torch.tensor([1])),
        (torch.tensor([300]), torch.tensor([1], dtype=torch.uint8)),
        (torch.tensor([-1]), torch.tensor([1], dtype=torch.uint8)),
        (torch.tensor([2]), torch.tensor([True])),
        (torch.tensor([1 + 2j]), torch.tensor([1.0])),
        (torch.tensor([70000]), torch.tensor([1.0]).half()),
    ],
)
def test_conversion_to_a_type_that_has_no_such_number_is_refused(was: torch.Tensor, now: torch.Tensor) -> None:
    with pytest.raises(StateMismatch, match="t: "):
        everstep.load(store=saved({"t": was}), state={"t": now}, cast=True)
    assert now.tolist() == [1]


def test_infinity_and_numbers_that_fit_are_converted() -> None:
    into = torch.zeros(3).half()
    everstep.load(store=saved({"t": torch.tensor([1.0, torch.inf, torch.nan])}), state={"t": into}, cast=True)
    assert into[:2].tolist() == [1.0, torch.inf]
    assert torch.isnan(into[2])
    whole = torch.zeros(1, dtype=torch.int32)
    everstep.load(store=saved({"t": torch.tensor([3.0])}), state={"t": whole}, cast=True)
    assert whole.tolist() == [3]


class Phase(enum.IntEnum):
    WARM = 1
    MAIN = 2


class Name(enum.StrEnum):
    A = "a"
    B = "b"


def test_enumerations_and_sizes_come_back_as_what_the_state_has() -> None:
    store = saved(
        {"p": Phase.MAIN, "d": {"n": Name.B, "s": torch.Size([2, 3]), Name.A: 1}, "k": {Phase.WARM: Phase.MAIN}}
    )
    state: dict[str, Any] = {
        "p": Phase.WARM,
        "d": {"n": Name.A, "s": torch.Size([1, 1]), Name.A: 0},
        "k": {Phase.WARM: Phase.WARM},
    }
    everstep.load(store=store, state=state)
    assert state["p"] is Phase.MAIN
    assert state["d"]["n"] is Name.B  # type: ignore[index]
    assert state["d"]["s"] == (2, 3)  # type: ignore[index]
    assert type(state["d"]["s"]) is torch.Size  # type: ignore[index]
    assert next(iter(state["k"].items())) == (Phase.WARM, Phase.MAIN)  # type: ignore[union-attr]
    assert [type(key) for key in state["k"]] == [Phase]
    assert [type(key) for key in state["d"]] == [str, str, Name]
    assert type(everstep.load(store=store).state["p"]) is int


def test_number_of_a_member_that_is_no_more_is_refused() -> None:
    with pytest.raises(StateMismatch, match="9 is not a valid Phase"):
        everstep.load(store=saved({"p": 9}), state={"p": Phase.WARM})


def test_step_that_is_no_integer_is_named(tmp_path: Path) -> None:
    store = saved({"a": 1})
    run = everstep.Checkpointer(store=store, on_event=lambda kind, **_: None)
    for name in ("step", "n"):
        for wrong in ("5", 5.0, True):
            with pytest.raises(TypeError, match=rf"{name}={wrong!r}: an integer is expected"):
                run.restore({"a": 0}, **{name: wrong})  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=f"{name}="):
                everstep.load(store=store, state={"a": 0}, **{name: wrong})  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=f"{name}="):
                everstep.open_commit(store=store, **{name: wrong})  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=f"{name}="):
                run.verify(**{name: wrong})  # type: ignore[arg-type]
    assert run.restore({"a": 0}, step=np.int64(5)) == 5  # type: ignore[arg-type]


def test_value_under_a_key_that_equals_nothing_is_filled_in_place() -> None:
    store = MemoryStore()
    nan = float("nan")
    saved = {"one": {nan: [4], (nan,): torch.tensor(5.0)}}
    with everstep.Checkpointer(store=store) as run:
        run.restore(saved)
        run.save(1, saved).wait(30)
    state: dict[str, Any] = {"one": {float("nan"): (filled := [0]), (nan,): (weight := torch.tensor(0.0))}}
    everstep.load(store=store, state=state)
    assert (filled, weight.item()) == ([4], 5.0)
    assert [*state["one"].values()] == [[4], weight]


def test_keys_that_would_be_one_when_they_are_read_are_refused() -> None:
    nan = float("nan")
    for held in ({nan: 1, float("nan"): 2}, {(1, nan): 1, (1, float("nan")): 2}):
        with pytest.raises(StateMismatch, match=r"^odd: two of its keys are .*nan"):
            everstep.Checkpointer(store=MemoryStore()).restore({"odd": held})
