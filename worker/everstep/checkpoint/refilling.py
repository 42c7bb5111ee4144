"""Puts a commit's plain values into those that a script has, in place where they can hold them.

Knows containers, tensors, arrays and enumerations. Invariant: what the script has a name for is filled itself, and what
it does not hold alone (a view, a part of another memory) is replaced instead of written to.
"""

from __future__ import annotations

import enum
from typing import Any

import torch


def refilled(live: Any, tree: Any, taken: set[int], keep: bool = False, cast: bool = False) -> Any:
    """`live` with the values of `tree`, where it can hold them; else `tree`. `taken`: what was refilled by now, which
    may stand in two places, and the commit may hold two values for them. `keep`: what only `live` has stays. `cast`:
    tensors and arrays get the dtype of the live ones.

    Raises `ValueError` for the value of an enumeration that has no such member.
    """
    if (live.data_ptr() if isinstance(live, torch.Tensor) and _owns(live) else id(live)) in taken:
        return tree
    if isinstance(live, dict) and isinstance(tree, dict):
        taken.add(id(live))
        # A key that is a member of an enumeration equals the plain one that the commit has.
        own = {(type(key.value), key.value): key for key in live if isinstance(key, enum.Enum)}
        keys = [own.get((type(key), key), key) for key in tree]
        values = [refilled(live.get(key), value, taken, keep, cast) for key, value in tree.items()]
        found = dict(zip(keys, values, strict=True))
        if not keep:
            live.clear()
        live.update(found)
        return live
    if isinstance(live, list) and isinstance(tree, list):
        taken.add(id(live))
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
    if isinstance(live, enum.Enum) and type(tree) is type(live.value):
        return type(live)(tree)
    if type(live).__module__ == "numpy" and getattr(live, "shape", None) == () and type(tree) is type(live.item()):
        return type(live)(tree)  # a number of numpy's, which the commit has as Python's
    return tree


def _refilled_tensor(live: torch.Tensor, tree: torch.Tensor, taken: set[int], cast: bool) -> torch.Tensor:
    if cast and live.shape == tree.shape:
        tree = tree.to(live.dtype)
    if not _fits(live, tree):
        return tree
    taken.add(live.data_ptr())
    with torch.no_grad():
        live.copy_(tree)
    return live


def _refilled_array(live: Any, tree: Any, taken: set[int], cast: bool) -> Any:
    if cast and live.shape == tree.shape:
        tree = tree.astype(live.dtype)
    if not (is_array(live) and is_alike(live, tree)):
        return tree
    taken.add(id(live))
    live[...] = tree
    return live


def _refilled_tuple(live: Any, tree: tuple[Any, ...], taken: set[int], keep: bool, cast: bool) -> tuple[Any, ...]:
    if isinstance(live, torch.Size):
        return torch.Size(tree)
    if len(live) != len(tree):
        return tree
    items = [refilled(one, other, taken, keep, cast) for one, other in zip(live, tree, strict=True)]
    return type(live)(*items) if hasattr(live, "_fields") else tuple(items)


def is_array(value: Any) -> bool:
    """Whether it is an array of numpy's and all of its memory; only states that hold some need numpy."""
    if not _is_numpy(value):
        return False
    whole = value.base is None or getattr(value.base, "size", None) == value.size
    return whole and bool(value.flags.writeable)


def _is_numpy(value: Any) -> bool:
    kind = type(value)
    return (kind.__module__, kind.__name__) == ("numpy", "ndarray")


def is_alike(live: Any, tree: Any) -> bool:
    return type(tree) is type(live) and bool(tree.shape == live.shape and tree.dtype == live.dtype)


def _fits(live: torch.Tensor, tree: torch.Tensor) -> bool:
    return live.shape == tree.shape and live.dtype == tree.dtype and _owns(live)


def _owns(tensor: torch.Tensor) -> bool:
    """Whether it is all of its memory: the rest may be something else's."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor._base is None
        and not tensor.is_inference()
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )
