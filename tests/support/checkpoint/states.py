"""States of all kinds that a script may hold, drawn by Hypothesis.

Hypothesis draws a description. From it the same state can be built as often as needed, or a blank one of the same form,
as a script has it before it restores. `states_held.py` says what a commit holds of each value, and `states_placed.py`
adds tensors that are cut over processes.
"""

from __future__ import annotations

import collections
import enum
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from everstep.checkpoint.state.tree import DTYPES
from support.checkpoint.states_held import shows_twice

PLAIN = (torch.Tensor, torch.nn.Parameter, DTensor)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


class Phase(enum.IntEnum):
    WARM = 1
    MAIN = 2


class Name(enum.StrEnum):
    A = "a"
    B = "b/c"


class Flags(enum.IntFlag):
    X = 1
    Y = 2


class Pair(NamedTuple):
    first: Any
    second: Any


class Three(tuple[Any, ...]):
    """A tuple with a name."""


class Tagged(torch.Tensor):
    """A subclass that only has another name."""


class Bag:
    """An object of a script."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return {"content": self.content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state["content"]


@dataclass(slots=True)
class Building:
    """One state that is being built. What is shared in it is made once. `moved`: what is cut is cut in another way."""

    blank: bool = False
    moved: bool = False
    bases: dict[Any, torch.Tensor] = field(default_factory=dict)


# --- leaves


@dataclass(frozen=True, slots=True)
class Plain:
    """A value without tensors, and what a script has in its place before it restores."""

    value: Any
    before: Any

    def build(self, into: Building) -> Any:
        return self.before if into.blank else self.value


@dataclass(frozen=True, slots=True)
class Ten:
    """A tensor: its elements are random bits. Those of the same `seed`, type and shape are one in memory, if shared."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int
    shared: bool
    view: str = "whole"
    wrap: str = "tensor"

    def build(self, into: Building) -> Any:
        name = (self.dtype, self.shape, self.seed)
        base = into.bases.get(name) if self.shared else None
        if base is None:
            base = bits(self.dtype, self.shape, None if into.blank else self.seed)
            if self.shared:
                into.bases[name] = base
        found = VIEWS[self.view](base)
        match self.wrap:
            case "parameter":
                return torch.nn.Parameter(found) if found.dtype in FLOATS else found
            case "buffer":
                return torch.nn.Buffer(found)
            case "tagged":
                return found.as_subclass(Tagged)
        return found


def bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int | None) -> torch.Tensor:
    count = math.prod(shape) * dtype.itemsize
    if seed is None:
        raw = torch.zeros(count, dtype=torch.uint8)
    else:
        high = 2 if dtype is torch.bool else 256
        raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "turned": lambda t: t.mT if t.dim() > 1 else t,
    "rows": lambda t: t[1:] if t.dim() else t,
    "first": lambda t: t[:-1] if t.dim() else t,
    "step": lambda t: t[..., ::2] if t.dim() else t,
    "flat": lambda t: t.reshape(-1),
    "wide": lambda t: t.expand(3, *t.shape),
    "window": lambda t: t.unfold(0, 2, 1) if t.dim() and t.shape[0] > 1 else t,
    "conj": lambda t: t.conj(),
    "imag": lambda t: t.conj().imag if t.is_complex() else t,
}


@dataclass(frozen=True, slots=True)
class Arr:
    """An array of numpy's, perhaps a view or of another byte order."""

    dtype: str
    shape: tuple[int, ...]
    seed: int
    form: str = "whole"

    def build(self, into: Building) -> Any:
        kind = np.dtype(self.dtype)
        count = math.prod(self.shape) * kind.itemsize
        raw = np.random.default_rng(self.seed).integers(0, 2 if kind.kind == "b" else 256, count, dtype=np.uint8)
        found = (np.zeros(count, np.uint8) if into.blank else raw).view(kind).reshape(self.shape)
        match self.form:
            case "copy":
                return found.copy()
            case "turned":
                return found.T
            case "columns":
                return np.asfortranarray(found)
            case "fixed":
                found = found.copy()
                found.flags.writeable = False
        return found


@dataclass(frozen=True, slots=True)
class Kept:
    """A bytearray, which is filled in place."""

    value: bytes

    def build(self, into: Building) -> Any:
        return bytearray(b"before" if into.blank else self.value)


# --- containers


@dataclass(frozen=True, slots=True)
class Box:
    """A container of others. `keys`: of a mapping."""

    kind: str
    items: tuple[Any, ...]
    keys: tuple[Any, ...] = ()

    def build(self, into: Building) -> Any:
        items = [item.build(into) for item in self.items]
        pairs = list(zip(self.keys, items, strict=False))
        match self.kind:
            case "list":
                return items
            case "tuple":
                return tuple(items)
            case "three":
                return Three(items)
            case "pair":
                return Pair(*items)
            case "dict":
                return dict(pairs)
            case "ordered":
                return collections.OrderedDict(pairs)
            case "default":
                return collections.defaultdict(list, pairs)
            case "user":
                return collections.UserDict(dict(pairs))
        return types.MappingProxyType(dict(pairs))


@dataclass(frozen=True, slots=True)
class Object:
    """One key of a state holds this: a value itself, an object, or a module of tensors."""

    kind: str
    item: Any

    def build(self, into: Building) -> Any:
        value = self.item.build(into)
        match self.kind:
            case "object":
                return Bag(value)
            case "module":
                return module_of(value)
        return value


def module_of(value: Any) -> torch.nn.Module:
    """A module with the tensors of `value` as parameters and buffers, the first of them twice; the rest of it is its
    extra state."""
    module = _Holding(value)
    for number, tensor in enumerate(tensors_in(value)):
        if tensor.dtype in FLOATS and not tensor.is_neg() and type(tensor) in PLAIN:
            module.register_parameter(f"p{number}", torch.nn.Parameter(tensor.detach()))
        else:
            module.register_buffer(f"b{number}", tensor.detach())
    for name, parameter in list(module.named_parameters())[:1]:
        module.register_parameter(f"{name}_tied", parameter)
    return module


class _Holding(torch.nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = [extra]  # in a list, as a parameter would be registered

    def get_extra_state(self) -> Any:
        return self.extra[0]

    def set_extra_state(self, state: Any) -> None:
        self.extra = [state]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value. A module has no use for those of which an element shows twice: it is filled in place."""
    if isinstance(value, torch.Tensor):
        return [] if shows_twice(value) else [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


# --- what is drawn

sizes = st.lists(st.sampled_from([2, 3, 1, 4, 0]), max_size=3).map(tuple)
seeds = st.integers(0, 3)
letters = st.characters(exclude_categories=()) | st.sampled_from("/~.$@ \x00\udc80")
# A lone half of a character, as the name of a file may have one, is kept; two that JSON would join are refused.
texts = st.text(letters, max_size=4).filter(lambda t: not any("\ud800" <= c < "\udc00" for c in t))
numbers = st.integers() | st.integers(-(10**4000), 10**4000) | st.sampled_from([2**63, -(2**64), 2**200])
floats = st.floats() | st.sampled_from([-0.0, 5e-324, math.nan, math.inf, -math.inf])
scalars = st.one_of(
    st.sampled_from([np.bool_, np.int8, np.uint64, np.float16, np.float32, np.float64]).flatmap(
        lambda kind: st.integers(0, 1).map(lambda n: (kind(n), kind(0)))
    ),
    st.floats(width=16).map(lambda x: (np.float16(x), np.float16(0))),
    st.floats(width=32).map(lambda x: (np.float32(x), np.float32(0))),
    st.floats().map(lambda x: (np.float64(x), np.float64(0))),
    texts.map(lambda t: (np.str_(t.rstrip("\0")), np.str_(""))),  # numpy's own `item()` leaves those out
    st.binary(max_size=3).map(lambda b: (np.bytes_(b + b"."), np.bytes_(b"."))),
)
members = st.sampled_from([(Phase.MAIN, Phase.WARM), (Name.B, Name.A), (Flags.X | Flags.Y, Flags.X)])
plain = st.one_of(
    st.none().map(lambda v: (v, v)),
    st.booleans().map(lambda v: (v, False)),
    numbers.map(lambda v: (v, 0)),
    floats.map(lambda v: (v, 0.0)),
    texts.map(lambda v: (v, "")),
    st.binary(max_size=5).map(lambda v: (v, b"")),
    sizes.map(lambda v: (torch.Size(v), torch.Size([9]))),
    members,
    scalars,
).map(lambda pair: Plain(*pair)) | st.binary(max_size=5).map(Kept)
tensors = st.builds(
    Ten, st.sampled_from(list(DTYPES)), sizes, seeds, st.booleans(), st.sampled_from(list(VIEWS)),
    st.sampled_from(["tensor", "tensor", "parameter", "buffer", "tagged"]),
)  # fmt: skip
arrays = st.builds(
    Arr,
    st.sampled_from(["?", "i1", "u1", "<i2", ">i2", "u2", ">i4", "u4", "i8", ">u8", "f2", ">f2", "f4", ">f8", "c8"]),
    sizes, seeds, st.sampled_from(["copy", "copy", "whole", "turned", "columns", "fixed"]),
)  # fmt: skip


# Mapped, because Hypothesis may look up how a key was drawn, and would take a member of `Name` for a text of its own.
keys = st.one_of(
    texts.map(str), st.integers().map(int), floats.map(float), st.none(), st.booleans(),
    st.sampled_from(list(Phase)), st.sampled_from(list(Name)),
    st.lists(st.none() | st.integers() | texts | st.binary(max_size=2) | floats, max_size=2).map(tuple),
)  # fmt: skip
named = st.lists(texts | st.sampled_from(["a", "b", "1"]), max_size=3, unique=True).map(tuple)
# NaN equals nothing, and two of it would be one in a commit.
any_keys = st.lists(keys, max_size=3, unique_by=(lambda key: key, repr)).map(tuple)


def boxes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(inner, max_size=3).map(tuple)
    three = st.lists(inner, min_size=3, max_size=3).map(tuple)
    return (
        st.builds(Box, st.sampled_from(["list", "tuple", "three"]), few)
        | st.builds(Box, st.just("pair"), st.lists(inner, min_size=2, max_size=2).map(tuple))
        | st.builds(
            Box, st.sampled_from(["dict", "dict", "ordered", "default", "user", "proxy"]), three, named | any_keys
        )
    )


complexes = st.builds(Ten, st.just(torch.complex64), sizes, seeds, st.booleans(), st.sampled_from(["conj", "imag"]))
ties = st.builds(  # few of them, so that a state often has several in the same memory
    Ten, st.sampled_from([torch.float32, torch.complex64]), st.just((2, 2)), st.just(1), st.just(True),
    st.sampled_from(["whole", "turned", "rows", "first", "flat"]),
)  # fmt: skip
leaves = plain | tensors | complexes | ties | arrays
state_keys = texts.filter(lambda t: t != "" and not t.startswith(("@", "$")))


def states_of(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Object]]:
    """States whose values end in these leaves."""
    trees = st.recursive(leaves, boxes, max_leaves=10)
    objects = st.builds(Object, st.sampled_from(["value", "value", "value", "object", "module"]), trees)
    return st.dictionaries(state_keys, objects.filter(_keeps), min_size=1, max_size=3)


def _keeps(found: Object) -> bool:
    """At the top a tensor that shows an element twice is refused: nothing could be read into it."""
    return not (
        found.kind == "value" and isinstance(found.item, Ten) and shows_twice(found.item.build(Building(blank=True)))
    )


states = states_of(leaves)
tied_states = states_of(ties)


def build(state: dict[str, Object], *, blank: bool = False, moved: bool = False) -> dict[str, Any]:
    """The state. Deterministic but for where it lies in memory."""
    into = Building(blank, moved)
    return {key: target.build(into) for key, target in state.items()}
