"""Finds which untracked tensors affect the parameters in one step.

While a `TensorFlow` is entered, it sees each torch function that the script calls, and notes which tensors were
computed from the given ones. A tensor reaches the parameters if `backward` is called on a loss computed from it, if a
gradient is computed from it, or if it is written into a tracked tensor. Steps that it cannot see (a custom autograd
function, numbers taken out of a tensor) end the trail, so "does not reach" is less certain than "reaches". Invariant:
it changes no value, and keeps no tensor alive.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.weak import WeakTensorKeyDictionary

ROWS = 2**17  # most rows of a tensor that is overwritten row by row
_NONE: frozenset[str] = frozenset()
_OVERWRITES = frozenset({"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "set_"})
_WRITES = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__set__"})
_SINKS = frozenset({"backward", "grad"})


class TensorFlow(TorchFunctionMode):
    """`sources`: tensors by name."""

    def __init__(self, sources: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._sources = {name: weakref.ref(tensor) for name, tensor in sources.items()}
        self._from: Any = WeakTensorKeyDictionary()  # tensor → the names from which it was computed
        self._rows: dict[str, set[int]] = {}  # the rows of a source that were overwritten in this step
        self._entered = False
        self._over = False
        self.reached = set[str]()
        self.overwritten = set[str]()  # sources that were wholly overwritten before their old values were read
        for name, tensor in sources.items():
            self._from[tensor] = frozenset({name})

    def begin(self) -> None:
        self._entered = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, tracked: Iterable[torch.Tensor]) -> None:
        """Stop watching. `tracked`: the tensors that may have been written to."""
        if not self._over:
            self._over = True
            self.note(tracked)
        # A mode that the script has entered since is above this one, and is left first.
        if self._entered and _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self._entered = False
            self.__exit__(None, None, None)

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the sources of these tensors reach the parameters."""
        for tensor in tensors:
            self.reached |= self._from.get(tensor, _NONE)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._over:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        sources: frozenset[str] = _NONE
        for tensor in _tensors((*args, *kwargs.values())):
            sources |= self._from.get(tensor, _NONE)
        result = func(*args, **kwargs)
        if name in _SINKS and sources:
            self.reached |= sources
        if _writes(name) and args:
            self._written(name, args, kwargs, sources)
        elif sources and name != "grad":
            self._mark(_tensors((result,)), sources)
        return result

    def _written(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], sources: frozenset[str]) -> None:
        target, *others = args
        other: frozenset[str] = _NONE
        for tensor in _tensors((*others, *kwargs.values())):
            other |= self._from.get(tensor, _NONE)
        if other:
            self._mark(_tensors((target,)), sources)
        elif isinstance(target, torch.Tensor) and self._is_overwritten(name, target, others):
            self.overwritten |= self._from.pop(target, _NONE)

    def _is_overwritten(self, name: str, target: torch.Tensor, others: list[Any]) -> bool:
        """Whether nothing is left of a tensor's values at the beginning of the step."""
        if name in _OVERWRITES:
            return True
        held = self._from.get(target, _NONE)
        if name != "__setitem__" or len(held) != 1 or not others or not target.dim():
            return False
        (source,) = held
        if self._sources[source]() is not target:
            return False
        rows, count = self._rows.setdefault(source, set()), target.shape[0]
        match others[0]:
            case bool():
                return False
            case int() as row if -count <= row < count:
                rows.add(row % count)
            case slice() as part if count <= ROWS:
                rows.update(range(*part.indices(count)))
            case e if e is Ellipsis:
                return True
        return len(rows) == count

    def _mark(self, tensors: Iterable[torch.Tensor], sources: frozenset[str]) -> None:
        for tensor in tensors:
            self._from[tensor] = self._from.get(tensor, _NONE) | sources


def is_safe() -> bool:
    """Whether watching each function has no effect: compiled code would be compiled again for this step alone."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    return getattr(compiler, "FRAME_COUNTER", 0) == 0


def _writes(name: str) -> bool:
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _tensors(values: Iterable[Any], depth: int = 0) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth < 2 and isinstance(value, list | tuple):
            yield from _tensors(value, depth + 1)
