"""Snapshots of tracked objects' nested values at a step's beginning: small tensors are copied, large ones watched.

The snapshot of a tensor without a copy is valid as long as the tensor has not changed. torch counts in-place changes
and another storage shows in its address. This module knows nothing of steps.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from everstep.checkpoint.state import layouts
from everstep.torch_private.tensors import raw, version

SMALL = 2**16  # bytes; the tensors of an object are copied in each step if they are together no larger
_PLAIN = (int, float, str, bytes, bool, type(None))
_ATOMS = frozenset(_PLAIN)  # a look at a value's type costs less than a call for each value, in each step


@dataclass(slots=True)
class TensorSnapshot:
    """A tensor's earlier state. Without a copy, the snapshot is valid only while the tensor has not changed."""

    tensor: torch.Tensor
    version: int
    address: int
    copy: torch.Tensor | None = None
    origin: torch.Tensor | None = None  # the same memory, for a tensor that may get another storage

    @property
    def moved(self) -> bool:
        return self.copy is None and (version(self.tensor), address(self.tensor)) != (self.version, self.address)

    def back(self) -> torch.Tensor:
        """The tensor with its earlier values. Not allowed for a tensor that has changed and has no copy."""
        if self.copy is not None:
            with torch.no_grad():
                if self.origin is not None and address(self.tensor) != self.address:
                    raw(self.tensor).data = self.origin  # its present memory may be shared with another tensor
                write(raw(self.tensor), raw(self.copy))
        return self.tensor


def address(tensor: Any) -> int:
    try:
        return int(raw(tensor).data_ptr())
    except (RuntimeError, ValueError):  # lazy, sparse, or without storage
        return 0


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a tensor. Memory that an expanded tensor repeats is written once, because torch refuses the
    rest."""
    if not layouts.is_dense(tensor):
        layouts.write(tensor, values)
        return
    if 0 in tensor.stride():
        once = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
        tensor, values = tensor[once], values[once]
    tensor.copy_(values)


def equal(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and values."""
    if layouts.is_dense(first) and layouts.is_dense(other):
        return first.shape == other.shape and first.dtype == other.dtype and torch.equal(first, other)
    (head, parts), (head_of_other, of_other) = layouts.parts_of(first), layouts.parts_of(other)
    return head == head_of_other and all(map(torch.equal, parts, of_other))


@dataclass(slots=True)
class _Array:
    """A numpy array's earlier state."""

    array: Any
    copy: Any


class _Dict(dict[Any, Any]):
    of: Any = None  # the mapping with these items


class _List(list[Any]):
    of: Any = None  # the list, deque or set


def hold(tree: Any, *, copies: bool = True) -> tuple[Any, list[TensorSnapshot]]:
    """The tree with each tensor replaced by a `TensorSnapshot`, and a list of these. Small tensors are copied."""
    captured: list[TensorSnapshot] = []
    kept = _hold(tree, captured)
    if captured and copies and sum(h.tensor.numel() * h.tensor.element_size() for h in captured) <= SMALL:
        for h in captured:
            h.copy, h.origin = h.tensor.detach().clone(), raw(h.tensor).detach()
    return kept, captured


def _hold(tree: Any, captured: list[TensorSnapshot]) -> Any:
    if isinstance(tree, _PLAIN):
        return tree
    if isinstance(tree, torch.Tensor):
        captured.append(TensorSnapshot(tree, version(tree), address(tree)))
        return captured[-1]
    if isinstance(tree, dict):
        items = _Dict({k: v if type(v) in _ATOMS else _hold(v, captured) for k, v in tree.items()})
        items.of = tree
        return items
    if isinstance(tree, list | deque | set):
        values = _List([v if type(v) in _ATOMS else _hold(v, captured) for v in tree])
        values.of = tree
        return values
    if type(tree) is tuple:
        return tree if _ATOMS.issuperset(map(type, tree)) else tuple(_hold(value, captured) for value in tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_hold(value, captured) for value in tree))
    if type(tree) is np.ndarray and tree.flags.writeable and tree.dtype != object:
        return _Array(tree, tree.copy())
    return copy.deepcopy(tree)


def is_known(tree: Any) -> bool:
    """Whether the tree holds only tensors, arrays and plain values."""
    if isinstance(tree, dict):
        return all(isinstance(key, (*_PLAIN, torch.Tensor)) and is_known(value) for key, value in tree.items())
    if isinstance(tree, frozenset) and any(isinstance(value, torch.Tensor) for value in tree):
        return False  # a copy would hold other objects
    if isinstance(tree, list | tuple | set | frozenset | deque):
        return all(map(is_known, tree))
    return isinstance(tree, (*_PLAIN, torch.Tensor, np.ndarray, np.generic, torch.dtype, torch.device))


def plain(kept: Any) -> Any:
    """The tree that `hold` got, with its earlier values, for `load_state_dict`."""
    if isinstance(kept, TensorSnapshot):
        return kept.tensor if kept.copy is None else kept.copy.clone()
    if isinstance(kept, _Array):
        return kept.copy.copy()
    if isinstance(kept, dict):
        return {key: plain(value) for key, value in kept.items()}
    if isinstance(kept, list):
        values = [plain(value) for value in kept]
        of = getattr(kept, "of", None)
        return deque(values, of.maxlen) if isinstance(of, deque) else set(values) if isinstance(of, set) else values
    if isinstance(kept, tuple):
        return _tuple(kept, map(plain, kept))
    return copy.deepcopy(kept)


def restore(live: Any, kept: Any) -> None:
    """Restore `live`, a dictionary or list, in place, and also the objects that it held."""
    if isinstance(kept, TensorSnapshot):
        kept.back()
    elif isinstance(kept, dict):
        items = {key: restored(value) for key, value in kept.items()}
        live.clear()
        live.update(items)
    elif isinstance(kept, list):
        values = [restored(value) for value in kept]
        live.clear()
        (live.update if isinstance(live, set) else live.extend)(values)
    elif isinstance(kept, _Array) and kept.array.shape == kept.copy.shape:
        np.copyto(kept.array, kept.copy)


def restored(kept: Any) -> Any:
    """The held object itself, with its earlier values. The script may hold a reference to it, and another object may be
    in its place by now."""
    if isinstance(kept, TensorSnapshot):
        return kept.back()
    if isinstance(kept, _Dict | _List):
        restore(kept.of, kept)
        return kept.of
    if isinstance(kept, _Array) and kept.array.shape == kept.copy.shape:
        np.copyto(kept.array, kept.copy)
        return kept.array
    if isinstance(kept, tuple):
        return _tuple(kept, map(restored, kept))
    return plain(kept)


def _tuple(like: Any, values: Iterable[Any]) -> Any:
    return type(like)(*values) if hasattr(like, "_fields") else type(like)(values)


def same(kept: Any, live: Any) -> bool:
    """Whether `live` has the kept values. Reads every tensor that was copied."""
    if isinstance(kept, TensorSnapshot):
        if not isinstance(live, torch.Tensor):
            return False
        if kept.copy is None:
            return address(live) == kept.address and not kept.moved
        return equal(live, kept.copy)
    if isinstance(kept, _Array):
        return type(live) is np.ndarray and live.dtype == kept.copy.dtype and np.array_equal(live, kept.copy)
    if isinstance(kept, dict):
        return isinstance(live, dict) and list(kept) == list(live) and all(same(v, live[k]) for k, v in kept.items())
    if isinstance(kept, list | tuple):
        return isinstance(live, (list, tuple, deque, set)) and len(kept) == len(live) and all(map(same, kept, live))
    try:
        return bool(kept == live)
    except (RuntimeError, ValueError):  # numpy arrays compare element by element
        return False


def tensors(tree: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tree, with their names."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors(value, f"{name}.{key}")
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from tensors(value, f"{name}.{i}")
