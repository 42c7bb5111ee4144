"""Digests of what values contain: numbers, containers, generators, iterators, functions and objects of the script.

Two values have equal digests exactly if they contain the same, in all processes: neither addresses nor the order of
hashes count. The order of a set or a dictionary does not count, as for `==`; that of an `OrderedDict` does. An object
of a library, of which nothing is known, counts as its class.

Invariants: no code of the script's classes is called, and nothing is advanced or drawn. A value of which more would
have to be read than the bounds allow has no digest.
"""

from __future__ import annotations

import array
import datetime
import decimal
import enum
import fractions
import functools
import gc
import marshal
import operator
import pathlib
import random
import types
import uuid
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import xxhash
from torch.nn.parameter import is_lazy

from everstep.recovery import digests
from everstep.train.guards.containers import MISSING, PLAIN, VIEWS, as_container, as_plain, length_of, steady_key
from everstep.train.guards.holders import parts_of_holder
from everstep.train.guards.script_objects import (
    PREFIXES,
    SUSPENDED,
    NamedValue,
    attributes,
    children,
    is_open,
    locals_of_suspended,
    state_of_function,
)

STATEFUL = (
    random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator, array.array,
    bytearray, enum.Enum, range, slice, fractions.Fraction, *SUSPENDED,
)  # fmt: skip
NAMED = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodWrapperType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.ClassMethodDescriptorType, np.ufunc, type,
)  # fmt: skip
FUNCTIONS = (*NAMED, types.MethodType)
PARTS = 4096  # of one value that are visited one by one
ELEMENTS = 2**16  # of one value that are read at once: plain ones of a container
TEXTS = 2**20  # characters of one value
DEPTH = 24
TOGETHER = 8  # times as much of all values of one reading
PRINTED = frozenset({
    datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone, decimal.Decimal,
    uuid.UUID, pathlib.PosixPath, pathlib.PurePosixPath, torch.dtype, torch.device,
})  # fmt: skip
DIGEST = " with digest "  # between what a value is and its digest


class Beyond(Exception):
    """Raised for a value that is too much to be read. The text says of what there is too much."""


class Full(Beyond):
    """Raised where the values of one reading are too much together. It says nothing of the value that came last."""


class Contents:
    """Of one reading, whose values share the bounds. `tensors`: whether the elements of tensors and arrays are read, of
    any size; otherwise their shapes are. `closed`: ids of objects that count as their classes. `bounded`: False reads
    all there is."""

    def __init__(self, closed: Iterable[int] = (), *, tensors: bool = False, bounded: bool = True) -> None:
        self._closed, self._tensors, self._bounded = frozenset(closed), tensors, bounded
        self._together = self._left = [PARTS * TOGETHER, ELEMENTS * TOGETHER, TEXTS * TOGETHER]
        self._known = dict[int, tuple[bytes, Any]]()  # digests of what is read, by its id, and what keeps that valid
        self._again = 0  # the outermost place in the present path that stands inside of itself

    def digest(self, value: Any) -> str:
        """16 digits. Raises `Beyond`, and what an object of a library raises."""
        self._left = [PARTS, ELEMENTS, TEXTS]
        self._known.clear()
        return self._digest(value, ()).hex()[:16]

    def _spend(self, kind: int, count: int) -> None:
        if not self._bounded:
            return
        self._left[kind] -= count
        self._together[kind] -= count
        if self._left[kind] < 0 or self._together[kind] < 0:
            most, what = ((PARTS, "parts"), (ELEMENTS, "elements"), (TEXTS, "characters"))[kind]
            if self._left[kind] < 0:
                raise Beyond(f"more than {most} {what}")
            raise Full(f"more than {most * TOGETHER} {what} with the values before it")

    def _digest(self, value: Any, path: tuple[int, ...]) -> bytes:
        kind = type(value)
        self._spend(0, 1)
        hasher = xxhash.xxh3_128(kind.__qualname__.encode(errors="replace"))
        if (plain := as_plain(value)) is not MISSING:
            self._spend(2, _size(plain))
            hasher.update(marshal.dumps(plain, 2))
            return hasher.digest()
        if id(value) in path:
            self._again = min(self._again, path.index(id(value)))
            hasher.update(b"%d up" % (len(path) - path.index(id(value))))
            return hasher.digest()
        if self._bounded and len(path) > DEPTH:
            raise Beyond(f"deeper than {DEPTH}")
        if id(value) in self._closed:
            return hasher.digest()
        if id(value) in self._known:
            return self._known[id(value)][0]
        again, self._again = self._again, len(path)
        inner = (*path, id(value))
        data, ordered, loose = self._read(value, kind)
        hasher.update(data)
        hasher.update(self._at_once(ordered) or b"".join([self._digest(part, inner) for part in ordered]))
        hasher.update(b"|")
        is_set = issubclass(kind, set | frozenset)
        hasher.update(
            self._at_once(loose, "set" if is_set else "pairs")
            or b"".join(sorted([self._digest(part, inner) for part in loose]))
        )
        # Under bounds each place is read and counted: equal values are beyond them alike, whatever they share.
        if not self._bounded and self._again >= len(path):
            self._known[id(value)] = hasher.digest(), value
        self._again = min(again, self._again)
        return hasher.digest()

    def _at_once(self, values: list[Any], order: str = "") -> bytes:
        """All of them, if they are plain and can be put in order; otherwise nothing."""
        inner = [part for pair in values for part in pair] if order == "pairs" else values
        kinds = set(map(type, inner))
        keys = set(map(type, inner[::2])) if order == "pairs" else kinds
        if not kinds <= PLAIN or (order and keys not in ({int}, {str})):
            return b""
        self._spend(1, len(inner))
        if kinds & {str, bytes}:
            texts = inner if kinds <= {str, bytes} else [part for part in inner if type(part) in (str, bytes)]
            self._spend(2, sum(map(len, texts)))
        return marshal.dumps(sorted(values) if order else values, 2)

    def _read(self, value: Any, kind: type) -> tuple[bytes, list[Any], list[Any]]:
        """What stands in a value: as bytes, in its order, and without an order, where pairs have a name or a key."""
        if issubclass(kind, torch.Tensor | np.ndarray | np.generic):
            return self._array(value, kind)
        if issubclass(kind, VIEWS):
            return b"", gc.get_referents(value), []
        if (length := length_of(value)) is not None:
            if self._bounded and length > ELEMENTS:
                raise Beyond(f"more than {ELEMENTS} elements")
            inner = as_container(value)
            own = [] if type(inner) is kind else sorted(attributes(value), key=_first)
            if issubclass(kind, OrderedDict):
                return b"", [list(inner.items()), own], []
            if isinstance(inner, dict):
                pairs = list(inner.items())
                has_numbers = int in set(map(type, inner))
                return b"", own, [(_steady(key, i), v) for i, (key, v) in enumerate(pairs)] if has_numbers else pairs
            if isinstance(inner, set | frozenset):
                return b"", own, [_steady(part, 0) for part in inner]
            elements = inner if isinstance(inner, list) else list(inner)
            return b"", [elements, own] if own else elements, []
        if issubclass(kind, enum.Enum):
            return str(object.__getattribute__(value, "_name_")).encode(), [], []
        if kind in PRINTED:
            return repr(value).encode(), [], []
        if issubclass(kind, array.array | bytearray):
            self._spend(2, memoryview(value).nbytes)
            return f"{getattr(value, 'typecode', '')}".encode() + memoryview(value).tobytes(), [], []
        if (state := _state(value, kind)) is not None:
            return b"", state, []
        if issubclass(kind, torch.nn.Module):
            parts = [(part.name, part.value) for part in children(NamedValue("", value))]
            return b"", [], [part for part in parts if self._tensors or not isinstance(part[1], torch.Tensor)]
        parts = list((parts_of_holder(value) or {}).items())
        return b"", parts, list(attributes(value)) if is_open(kind) else []

    def _array(self, value: Any, kind: type) -> tuple[bytes, list[Any], list[Any]]:
        head = f"{value.dtype} {shape_of(value)}".encode()
        if issubclass(kind, torch.Tensor):
            known = self._tensors and not value.is_meta and not is_lazy(value)
            return head + (b"%d" % digests.content(value) if known else b""), [], []
        if value.dtype.hasobject:
            if self._bounded and value.size > ELEMENTS:
                raise Beyond(f"more than {ELEMENTS} elements")
            return head, np.asarray(value).reshape(-1).tolist(), []
        if issubclass(kind, np.generic) or self._tensors:
            data: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            head += b"%d" % xxhash.xxh3_64_intdigest(data)
        return head, [], []


def digest_of(value: Any) -> str:
    """Of all that a value contains, its tensors too. Raises what the script's own classes raise."""
    return Contents(tensors=True, bounded=False).digest(value)


def shape_of(value: Any) -> str:
    """What a tensor or an array is, for a person."""
    if not isinstance(value, torch.Tensor):
        return f"array of shape {list(value.shape)}"
    return "nested tensor" if value.is_nested else f"tensor of shape {list(value.shape)}"


def _size(plain: Any) -> int:
    """In characters, about."""
    kind = type(plain)
    if kind is str or kind is bytes:
        return len(plain)
    return 1 + (plain.bit_length() >> 3) if kind is int else 1


def name_of(function: Any) -> str:
    """What distinguishes a function, a method or a class from others: of a lambda or a function in another one, which
    may share their names, its place too."""
    if isinstance(function, types.MethodType):
        return name_of(function.__func__) if isinstance(function.__func__, NAMED) else type(function.__func__).__name__
    name = str(getattr(function, "__qualname__", function.__name__))
    if isinstance(function, types.FunctionType) and "<" in name:
        column = max(column or 0 for _, _, column, _ in function.__code__.co_positions())
        return f"{name} (line {function.__code__.co_firstlineno}, column {column})"
    return name


def bound_to(function: Any) -> Any:
    """The object of which a method is; None for another function."""
    owner = getattr(function, "__self__", None)
    return None if isinstance(owner, types.ModuleType) else owner


def _steady(key: Any, index: int) -> Any:
    """A text in place of a key that is an address."""
    steady = steady_key(key, index)
    return key if steady is key else repr(steady)


def _first(pair: Any) -> Any:
    return pair[0]


def _state(value: Any, kind: type) -> list[Any] | None:
    """What decides the further course of a generator, an iterator or a function; None for another value."""
    if issubclass(kind, random.Random):
        return [] if issubclass(kind, random.SystemRandom) else list(random.Random.getstate(value))
    if issubclass(kind, np.random.Generator):
        return [_without_arrays(value.bit_generator.state)]
    if issubclass(kind, np.random.BitGenerator):
        return [_without_arrays(value.state)]
    if issubclass(kind, np.random.RandomState):
        return [_without_arrays(value.get_state(legacy=False))]
    if issubclass(kind, torch.Generator):
        return [value.get_state().numpy().tobytes()]
    if issubclass(kind, SUSPENDED):
        return _suspended(value)
    if issubclass(kind, types.FunctionType):
        return [name_of(value), state_of_function(value)]
    if issubclass(kind, types.MethodType):
        return [value.__func__, value.__self__]
    if issubclass(kind, NAMED):
        return [getattr(value, "__module__", None), name_of(value), bound_to(value)]
    if kind in (range, slice):
        return [value.start, value.stop, value.step]
    if kind is fractions.Fraction:
        return [value.numerator, value.denominator]
    if issubclass(kind, functools.partial):
        return [value.func, value.args, value.keywords]
    return _position(value, kind) if is_iterator(kind) else None


def is_iterator(kind: type) -> bool:
    """Whether it is one of Python's own, which advances when it is read from."""
    return kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")


def _without_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _without_arrays(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _suspended(value: Any) -> list[Any]:
    code, variables = locals_of_suspended(value)
    if variables is None:
        return [code.co_qualname]
    prefix = next(letters for letters in PREFIXES if hasattr(value, f"{letters}_frame"))
    inner = getattr(value, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await")
    return [code.co_qualname, getattr(value, f"{prefix}_frame").f_lasti, dict(variables), inner]


def _position(value: Any, kind: type) -> list[Any]:
    """Of an iterator of Python's own."""
    if operator.length_hint(value, 0) > ELEMENTS and not kind.__name__.startswith(("list", "tuple", "range")):
        raise Beyond(f"more than {ELEMENTS} elements")
    try:
        return list(value.__reduce__()[1:])
    except TypeError:  # it cannot say
        return []
