"""Whatever a state holds comes back equal, type for type and bit for bit, or is refused by name before it is saved.

Hypothesis draws the states: see `states.py`. A third of them hold something that no commit takes.
"""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.utils._python_dispatch import return_and_correct_aliasing

import everstep
from everstep.checkpoint import StateMismatch
from everstep.checkpoint.state import alike, tree
from everstep.checkpoint.state import capture as state_module
from everstep.storage import MemoryStore
from support.checkpoint import states
from support.checkpoint.states_checked import FEW, MANY, check, committed, times


@given(states.states)
@times(FEW)
def test_state_of_any_kind_comes_back_equal(described: dict[str, states.Object]) -> None:
    check(described)


@pytest.mark.long
@pytest.mark.timeout(3600)
@given(states.states)
@times(MANY)
def test_ten_thousand_states_of_any_kind_come_back_equal(described: dict[str, states.Object]) -> None:
    check(described)


# --- what no commit holds


class Color(enum.Enum):
    RED = object()


@dataclasses.dataclass
class Record:
    a: int = 1


class Wrapper(torch.Tensor):
    """Computes its elements from another tensor, as quantized weights do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [a.inner if isinstance(a, cls) else a for a in args]
        return return_and_correct_aliasing(func, args, kwargs or {}, cls(func(*inner, **(kwargs or {}))))


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(8)
    return tensor


ODD_TYPES = ("complex128", "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
             "bits8", "uint4", "int3")  # fmt: skip
REFUSED: dict[str, Callable[[], Any]] = {
    "object": object, "complex": lambda: 1j, "set": lambda: {1}, "frozenset": frozenset, "path": pathlib.Path,
    "date": lambda: datetime.date(2026, 1, 1), "decimal": decimal.Decimal, "fraction": fractions.Fraction,
    "enumeration": lambda: Color.RED, "dataclass": Record, "range": lambda: range(3), "deque": collections.deque,
    "list of a user": collections.UserList, "type": lambda: torch.float32, "device": lambda: torch.device("cpu"),
    "function": lambda: len, "generator": torch.Generator, "huge": lambda: 10**4300,
    "torn text": lambda: "\ud83d\ude00", "torn key": lambda: {"\ud83d\ude00": 1},
    "bytes as a key": lambda: {b"k": 1}, "set as a key": lambda: {frozenset(): 1},
    "object in a key": lambda: {(1, object()): 1}, "deep": lambda: deep(lambda x: [x], 51),
    "deep keys": lambda: deep(lambda x: {1: x}, 17), "deep tuples": lambda: deep(lambda x: (x,), 26),
    "numpy complex": lambda: np.complex64(1j), "numpy time": lambda: np.datetime64("2026-01-01"),
    "numpy wide": lambda: np.longdouble(1), "array of objects": lambda: np.array([object()]),
    "row of records": lambda: np.zeros(2, [("a", "i4")])[0],
    "array of texts": lambda: np.array(["a"]), "array of records": lambda: np.zeros(2, [("a", "i4")]),
    "masked array": lambda: np.ma.masked_array([1], [True]), "matrix": lambda: np.matrix([[1, 2]]),
    "wide array": lambda: np.zeros(2, np.longdouble), "complex array": lambda: np.zeros(2, complex),
    "sparse": lambda: torch.eye(2).to_sparse(), "sparse rows": lambda: torch.eye(2).to_sparse_csr(),
    "dense of another library": lambda: torch.eye(2).to_mkldnn(), "meta": lambda: torch.empty(2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "lazy": torch.nn.UninitializedParameter, "freed": freed, "cut": cut, "wrapper": lambda: Wrapper(torch.ones(2)),
    **{kind: lambda kind=kind: torch.empty(2, dtype=getattr(torch, kind)) for kind in ODD_TYPES},
}  # fmt: skip


def deep(wrap: Callable[[Any], Any], levels: int) -> Any:
    found: Any = 0
    for _ in range(levels):
        found = wrap(found)
    return found


WRAPS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda v: [1, v], "/1"), "tuple": (lambda v: (v,), "/0"), "mapping": (lambda v: {"a/b": v}, "/a~1b"),
    "number": (lambda v: {7: v}, "/7"), "ordered": (lambda v: collections.OrderedDict(k=v), "/k"),
}  # fmt: skip


def check_refused(kind: str, around: list[str], rest: dict[str, states.Object], how: str) -> None:
    value, path = REFUSED[kind](), ""
    for wrap in around:
        made, place = WRAPS[wrap]
        value, path = made(value), place + path
    if how == "object":
        value, path = states.Bag(value), "/content" + path
    state = {**states.build(rest), "odd": value}
    store = MemoryStore()
    run = everstep.Checkpointer(store=store, nonfinite="allow", on_event=lambda *_, **__: None)
    with pytest.raises(StateMismatch) as told:
        run.restore(dict(state))
    assert str(told.value).startswith(f"odd{path}"[:80] if "deep" in kind else f"odd{path}"), told.value
    with pytest.raises(StateMismatch):  # and a save does not take what appears later
        run.save(1, state)
    run.close()
    assert not [name for name in store.objects if name.startswith("data/")]
    assert everstep.Checkpointer(store=store).list() == ()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_commit_holds_is_refused_by_name_before_anything_is_saved(kind: str) -> None:
    check_refused(kind, [], {}, "value")


wraps = st.lists(st.sampled_from(list(WRAPS)), max_size=3)
refused = (st.sampled_from(list(REFUSED)), wraps, states.states, st.sampled_from(["value", "object"]))


@pytest.mark.long
@given(*refused)
@times(FEW)
def test_what_no_commit_holds_is_found_anywhere_in_a_state(
    kind: str, around: list[str], rest: dict[str, states.Object], how: str
) -> None:
    check_refused(kind, around, rest, how)


@pytest.mark.parametrize("view", ["wide", "window"])
def test_tensor_of_which_an_element_shows_twice_is_refused_where_it_would_be_read_into(view: str) -> None:
    tensor = states.VIEWS[view](torch.arange(6.0).view(3, 2))
    with pytest.raises(StateMismatch, match="odd: several of its elements share"):
        committed({"odd": tensor})
    with pytest.raises(StateMismatch, match="odd: several of its elements share"):
        everstep.load(store=committed({"odd": tensor.clone()}), state={"odd": tensor})


# --- the rows of what was found


def loaded(was: Any, now: Any) -> Any:
    """What a state has after the load of `was` into `now`."""
    state = {"x": now}
    everstep.load(store=committed({"x": was}), state=state)
    return state["x"]


def test_mapping_that_is_no_dict_is_filled_in_place_or_comes_back_as_its_type() -> None:
    inner = collections.UserDict(a=0)
    found = loaded([collections.UserDict(a=1), types.MappingProxyType({"b": 2})], [inner, types.MappingProxyType({})])
    assert found[0] is inner
    assert dict(inner) == {"a": 1}
    assert type(found[1]) is types.MappingProxyType
    assert dict(found[1]) == {"b": 2}


def test_bytearray_array_of_another_byte_order_and_view_are_filled_in_place() -> None:
    text, swapped, flat, wide = bytearray(b"old"), np.zeros(2, ">i4"), torch.zeros(6), np.zeros(8)
    parts = {"a": flat[:2], "b": flat[2:5], "tie": flat[:2], "step": wide[::2]}
    was = {"t": bytearray(b"new!"), "s": np.array([1, 2], "i4"), "a": torch.ones(2), "b": torch.full((3,), 2.0),
           "tie": torch.ones(2), "step": np.ones(4)}  # fmt: skip
    now = loaded(was, {"t": text, "s": swapped, **parts})
    assert text == b"new!"
    assert swapped.tolist() == [1, 2]
    assert flat.tolist() == [1, 1, 2, 2, 2, 0]
    assert wide.tolist() == [1, 0] * 4
    assert now["tie"] is parts["tie"], "what is tied stays tied where the commit has the same for both"


def test_parameter_that_is_a_view_stays_one_and_tuples_keep_their_types() -> None:
    flat = torch.zeros(4)
    one = torch.nn.Parameter(flat[:2])
    most = torch.zeros(2, 2).max(0)
    now = loaded([torch.ones(2), (states.Three((1, 2)), torch.eye(2).max(0))], [one, (states.Three((0, 0)), most)])
    assert now[0] is one
    assert flat.tolist() == [1, 1, 0, 0]
    assert type(now[1][0]) is states.Three
    assert type(now[1][1]) is type(most)
    assert now[1][1].values.tolist() == [1, 1]


def test_axis_of_one_element_may_have_any_stride() -> None:
    now = torch.zeros(3)[::4]
    assert now.stride() == (4,)
    assert loaded({"t": torch.ones(1)}, {"t": now})["t"].tolist() == [1]


def test_bytes_of_one_element_that_has_a_stride_are_compared_between_ranks() -> None:
    for one in (torch.arange(6.0)[::6], torch.full((1, 1), 2j, dtype=torch.complex64).imag):
        assert alike.to_bytes(one).tobytes() == one.clone(memory_format=torch.contiguous_format).numpy().tobytes()


def test_memory_that_overlaps_gets_no_mixture_of_two_values() -> None:
    flat = torch.zeros(5)
    now = loaded({"a": torch.ones(3), "b": torch.full((3,), 2.0)}, {"a": flat[:3], "b": flat[2:]})
    assert [now["a"].tolist(), now["b"].tolist()] == [[1] * 3, [2] * 3]


def test_member_of_an_enumeration_of_texts_is_held_as_its_text() -> None:
    # What a commit holds and what a state holds are compared key by key, and a member is written in another way.
    assert repr(tree.Flattener().flatten({None: 1, states.Name.A: states.Name.B}, "x")) == (
        "{'$dict': [[None, 1], ['a', 'b/c']]}"
    )


# --- the check can fail


def _swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tree.TORCH, "U16", torch.int16)


def _ties_without_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "identity", lambda tensor: (tree.memory_of(tensor), tensor.dtype, tensor.shape))


def _ties_without_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "memory_of", lambda tensor: (tensor.untyped_storage().data_ptr(),))


def _lists_for_tuples(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tree._tagged

    def tagged(tag: str, *rest: Any) -> Any:
        return list(real(tag, *rest)) if tag == "$tuple" else real(tag, *rest)

    monkeypatch.setattr(tree, "_tagged", tagged)


def _no_conjugate(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tree.Flattener._add

    def add(self: tree.Flattener, tensor: torch.Tensor, path: str) -> str:
        return real(self, torch._conj(tensor) if tensor.is_conj() else tensor, path)

    monkeypatch.setattr(tree.Flattener, "_add", add)


def _replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "refilled", lambda live, tree, *_, **__: tree)


PLANTED = [
    (_swapped, states.states), (_lists_for_tuples, states.states), (_no_conjugate, states.states),
    (_replaced, states.states), (_ties_without_offsets, states.tied_states),
    (_ties_without_strides, states.tied_states),
]  # fmt: skip


@pytest.mark.long_but("lists_for_tuples")
@pytest.mark.parametrize(
    ("plant", "drawn"),
    [pytest.param(plant, drawn, id=plant.__name__.strip("_")) for plant, drawn in PLANTED],
)
@pytest.mark.timeout(600)
def test_planted_defect_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    drawn: SearchStrategy[dict[str, states.Object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @given(drawn)
    @times(MANY - 1, Phase.generate)
    def checked(described: dict[str, states.Object]) -> None:
        check(described)

    plant(monkeypatch)
    with pytest.raises((AssertionError, StateMismatch)):
        checked()
