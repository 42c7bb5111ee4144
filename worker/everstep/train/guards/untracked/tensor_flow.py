"""Which untracked tensors reach the parameters in one step.

While a `TensorFlow` is entered it sees each function of torch's that the script calls, and notes what was computed from
the tensors that it was given. One of them reaches the parameters if a loss is computed from it on which `backward` is
called, or a gradient, or if it is written into a tracked tensor. What it cannot see (a custom autograd function,
numbers taken out of a tensor) ends the trail, so that "does not reach" is weaker than "reaches".

Invariant: changes no value, and keeps no tensor alive.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.weak import WeakTensorKeyDictionary

ROWS = 2**17  # of a tensor that is overwritten row by row
_NONE: frozenset[str] = frozenset()
_OVERWRITES = frozenset({"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "set_"})
_WRITES = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__set__"})
_SINKS = frozenset({"backward", "grad"})


class TensorFlow(TorchFunctionMode):
    """`sources`: tensors by name."""

    def __init__(self, sources: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._sources = {name: weakref.ref(tensor) for name, tensor in sources.items()}
        self._from: Any = WeakTensorKeyDictionary()  # tensor → the names it was computed from
        self._rows: dict[str, set[int]] = {}  # of a source: those that were overwritten in this step
        self._entered = False
        self._over = False
        self.reached = set[str]()
        self.overwritten = set[str]()  # wholly, before anything of the step before was read from there
        for name, tensor in sources.items():
            self._from[tensor] = frozenset({name})

    def begin(self) -> None:
        self._entered = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, tracked: Iterable[torch.Tensor]) -> None:
        """See nothing more. `tracked`: what may have been written to."""
        if not self._over:
            self._over = True
            self.note(tracked)
        # One that the script has entered since is above this one, and is left first.
        if self._entered and _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self._entered = False
            self.__exit__(None, None, None)

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """What these were computed from reaches the parameters."""
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
        """Whether nothing is left of what a tensor held when the step began."""
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
    """Whether seeing each function changes nothing: compiled code would be compiled again for this step alone."""
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
