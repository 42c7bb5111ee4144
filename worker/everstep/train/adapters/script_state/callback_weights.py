"""Weights that a callback keeps for itself and changes: no commit and no new process has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from everstep.recovery.errors import LoopError
from everstep.torch_private.tensors import marks
from everstep.train.adapters.script_state.attributes import LIBRARIES
from everstep.train.adapters.script_state.values import MOST


class CallbackWeights:
    """Finds weights that a callback keeps for itself and changes in each step: an average of the model's, a probe.

    `model`: its tensors are in the state, whoever else refers to them. A copy that is renewed now and then, such as the
    best weights so far, is let through.
    """

    def __init__(self, callbacks: Iterable[object], model: torch.nn.Module) -> None:
        self._callbacks = list(callbacks)
        self._own = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._modules = {id(m) for m in model.modules()}
        self._shapes = [p.shape for p in model.parameters()]
        self._before: dict[str, tuple[object, list[tuple[int, int] | None]]] = {}
        self._moved: set[str] = set()  # in the step before

    def check(self) -> None:
        """Look at the end of a step. Raises `LoopError` for weights that this step and the one before it changed."""
        now = {
            f"{type(callback).__name__}.{name}": (callback, marks(weights))
            for callback in self._callbacks
            for name, value in getattr(callback, "__dict__", {}).items()
            if (weights := [t for t in self._weights(value) if id(t) not in self._own])
        }
        moved = {name for name, seen in now.items() if name in self._before and self._before[name][1] != seen[1]}
        for name in sorted(moved & self._moved):
            if not _tells_tensors(now[name][0]):
                raise LoopError(
                    f"the callback's attribute {name} holds weights that each step changes, and that no commit and no "
                    "new process has. Keep them in the model: make the module an attribute of it (with "
                    "requires_grad_(False) if it is an average), or register tensors with model.register_buffer, and "
                    "let the callback change them there. With Lightning the callback's own state_dict() and "
                    "load_state_dict() do as well"
                )
        self._before, self._moved = now, moved

    def _weights(self, value: Any, deep: bool = True) -> Iterator[torch.Tensor]:
        """Those of a module; or of a collection whose tensors have the shapes of half of the model's parameters, since
        another one is no copy of it; or those of an object of the script's that holds such."""
        if id(value) in self._modules:
            return  # many callbacks refer to the model, and walking it costs time in each step
        if isinstance(value, torch.nn.Module):
            yield from value.parameters()
        elif isinstance(value, dict | list | tuple):
            if len(value) > max(MOST, 8 * len(self._shapes)):
                return  # a list of losses that grows, which each step would read whole
            values = value.values() if isinstance(value, dict) else value
            alike = [t for t in values if isinstance(t, torch.Tensor) and t.dim() and t.shape in self._shapes]
            yield from alike if 2 * len(alike) >= len(self._shapes) else ()
        elif deep and type(value).__module__.partition(".")[0] not in LIBRARIES:
            for each in getattr(value, "__dict__", {}).values():
                yield from self._weights(each, deep=False)


def _tells_tensors(callback: Any) -> bool:
    """Whether the state that the callback gives to checkpoints, and to ours, has tensors."""
    tell = getattr(callback, "state_dict", None)
    return tell is not None and any(isinstance(leaf, torch.Tensor) for leaf in _leaves(tell()))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(each)
    else:
        yield value
