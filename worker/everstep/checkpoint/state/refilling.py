"""Puts a commit's plain values into those that a script has, in place where they can hold them.

Knows containers, tensors, arrays and enumerations. Invariant: an object that the script has a name for is filled in
place. Memory that two values share is filled once: the second value stays as it is if the commit has the same for it,
and is replaced if the commit has another one.
"""

from __future__ import annotations

import enum
from bisect import bisect
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.checkpoint.state import layouts
from everstep.checkpoint.state.layouts import same_bits, shows_twice, span
from everstep.checkpoint.state.sharding import is_sharded, placed_as
from everstep.torch_private.tensors import below_subclasses


@dataclass(slots=True)
class Taken:
    """The objects refilled so far, by their `id`, and the ranges of memory, sorted and without overlap."""

    objects: set[int] = field(default_factory=set)
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def meets(self, begin: int, end: int) -> bool:
        """Whether some of this memory was filled already. If not, the memory now counts as filled."""
        at = bisect(self.begins, begin)
        if begin < end and ((at and self.ends[at - 1] > begin) or (at < len(self.begins) and self.begins[at] < end)):
            return True
        if begin < end:
            self.begins.insert(at, begin)
            self.ends.insert(at, end)
        return False


def refilled(live: Any, tree: Any, taken: Taken, keep: bool = False, cast: bool = False) -> Any:
    """`live` filled with the values of `tree`, if it can hold them; else `tree`. `taken`: the objects refilled so far;
    the state may contain one of them twice, with two values in the commit. `keep`: keep entries that only `live` has.
    `cast`: tensors and arrays get the dtype of the live ones.

    Raises `ValueError` for the value of an enumeration that has no such member.
    """
    if id(live) in taken.objects:
        return tree
    if isinstance(live, Mapping) and isinstance(tree, dict):
        return _refilled_mapping(live, tree, taken, keep, cast)
    if isinstance(live, list) and isinstance(tree, list):
        taken.objects.add(id(live))
        live[:] = [
            refilled(live[i] if i < len(live) else None, value, taken, keep, cast) for i, value in enumerate(tree)
        ]
        return live
    if isinstance(live, torch.Tensor) and isinstance(tree, torch.Tensor):
        return _refilled_tensor(live, tree, taken, cast)
    if _is_numpy(live) and _is_numpy(tree):
        return _refilled_array(live, tree, taken, cast)
    if isinstance(live, tuple) and isinstance(tree, tuple):
        return _refilled_tuple(live, tree, taken, keep, cast)
    if isinstance(live, bytearray) and isinstance(tree, bytes):
        taken.objects.add(id(live))
        live[:] = tree
        return live
    if isinstance(live, enum.Enum) and type(tree) is type(live.value):
        return type(live)(tree)
    if type(live).__module__ == "numpy" and getattr(live, "shape", None) == () and type(tree) is type(live.item()):
        return type(live)(tree)  # a numpy number, which is a Python number in the commit
    return tree


def in_classes_of(live: Any, tree: Any) -> Any:
    """`tree` with its mappings converted to the classes that they have in `live`, for an object that needs these
    classes: a commit has a `Counter` as a plain dictionary. `live` is not changed."""
    if isinstance(tree, dict) and isinstance(live, Mapping):
        values = {key: in_classes_of(live.get(key), value) for key, value in tree.items()}
        if isinstance(live, defaultdict):
            return defaultdict(live.default_factory, values)
        return type(live)(values) if isinstance(live, Counter | OrderedDict) else values
    if type(tree) in (list, tuple) and isinstance(live, list | tuple) and len(live) == len(tree):
        return type(tree)(in_classes_of(item, value) for item, value in zip(live, tree, strict=True))
    return tree


def _refilled_mapping(live: Any, tree: dict[Any, Any], taken: Taken, keep: bool, cast: bool) -> Any:
    # Python does not find some keys by the commit's form of them: a member of an enumeration, NaN, a tuple with NaN.
    names = Counter(_name(key) for key in live)
    own = {name: key for key in live if names[name := _name(key)] == 1}
    keys = [own.get(_name(key), key) for key in tree]
    mutable = isinstance(live, MutableMapping)
    if mutable:
        taken.objects.add(id(live))
    values = [refilled(live.get(key), value, taken, keep, cast) for key, value in zip(keys, tree.values(), strict=True)]
    entries = dict(zip(keys, values, strict=True))
    if not mutable:  # a view of another mapping, or a frozen one
        return type(live)({**live, **entries} if keep else entries)
    if not keep:
        live.clear()
    live.update(entries)
    return live


def _name(key: Any) -> tuple[type, Any]:
    plain = key.value if isinstance(key, enum.Enum) else key
    return type(plain), repr(plain) if isinstance(plain, float | tuple) else plain


def _refilled_tensor(live: torch.Tensor, tree: torch.Tensor, taken: Taken, cast: bool) -> torch.Tensor:
    if cast and live.shape == tree.shape:
        tree = tree.to(live.dtype)
    if live.shape == tree.shape and is_sharded(live):
        return _refilled_part(live, placed_as(live, tree), taken)
    if not (live.shape == tree.shape and live.dtype == tree.dtype and _writable(live)):
        return tree
    if taken.meets(*span(live)):
        return live if same_bits(live, tree) else tree
    with torch.no_grad(), below_subclasses():
        live.copy_(tree)
    return live


def _refilled_part(live: Any, tree: Any, taken: Taken) -> torch.Tensor:
    """Fill this rank's part of a sharded tensor from `tree`, which is sharded in the same way."""
    with torch.no_grad():
        own, source = live.to_local(), tree.to_local()
    part = _refilled_tensor(own, source, taken, cast=False)
    kept: torch.Tensor = live if part is own else tree
    return kept


def _refilled_array(live: Any, tree: Any, taken: Taken, cast: bool) -> Any:
    if cast and live.shape == tree.shape:
        tree = tree.astype(live.dtype)
    if not (is_array(live) and is_alike(live, tree)):
        return tree
    if taken.meets(*_span_of_array(live)):
        return live if live.tobytes() == tree.astype(live.dtype).tobytes() else tree
    live[...] = tree
    return live


def _refilled_tuple(live: Any, tree: tuple[Any, ...], taken: Taken, keep: bool, cast: bool) -> tuple[Any, ...]:
    if isinstance(live, torch.Size):
        return torch.Size(tree)
    if len(live) != len(tree):
        return tree
    items = [refilled(item, other, taken, keep, cast) for item, other in zip(live, tree, strict=True)]
    if hasattr(type(live), "n_sequence_fields"):  # a struct sequence, as Tensor.max returns one
        made: Any = type(live)
        filled: tuple[Any, ...] = made(items)
        return filled
    return tuple.__new__(type(live), items)


def is_array(value: Any) -> bool:
    """Whether the value is a writable numpy array. numpy is not imported for this: not all states need it."""
    return _is_numpy(value) and bool(value.flags.writeable) and not shows_twice(value.shape, value.strides)


def _span_of_array(array: Any) -> tuple[int, int]:
    begin = end = array.__array_interface__["data"][0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        begin, end = begin + min(0, stride * (size - 1)), end + max(0, stride * (size - 1))
    return begin, end + array.itemsize if array.size else begin


def _is_numpy(value: Any) -> bool:
    kind = type(value)
    return (kind.__module__, kind.__name__) == ("numpy", "ndarray")


def is_alike(live: Any, tree: Any) -> bool:
    """Whether two numpy arrays have the same shape and type; the byte order may differ."""
    if not (_is_numpy(live) and _is_numpy(tree)):
        return False
    return bool(tree.shape == live.shape and tree.dtype == live.dtype.newbyteorder("="))


def _writable(tensor: torch.Tensor) -> bool:
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and layouts.is_dense(tensor)
        and not tensor.is_inference()
        and not shows_twice(tensor.shape, tensor.stride())
    )
