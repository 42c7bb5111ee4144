"""Hooks on the steps of optimizers, and the state that their steps change, for optimizers of unusual classes too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch

from everstep.torch_private.optimizers import make_hook_tables


def before_step(optimizer: torch.optim.Optimizer, call: Callable[..., None]) -> Any:
    """Call `call(optimizer, args, kwargs)` before each step, until `remove()` of the returned handle."""
    make_hook_tables(optimizer)
    return optimizer.register_step_pre_hook(call)


def has_closure(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether a step is given a closure, by the arguments of its hooks. The first argument is the optimizer itself."""
    return any(given is not None for given in arguments[1:]) or options.get("closure") is not None


_OF_ALL = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)))  # attributes that each optimizer has


@dataclass(frozen=True, slots=True)
class StateOwner:
    """A dictionary with state that an optimizer's steps change, under these keys (None: all). `whole`: keys that a step
    adds are state too."""

    live: dict[Any, Any]
    keys: frozenset[str] | None
    whole: bool


def state_owners(optimizer: Any, tracked: Collection[int], *, inner: bool = False) -> Iterator[StateOwner]:
    """The places of the state that an optimizer's steps change. A class that is not torch's may keep more than `state`,
    and may contain another optimizer. `tracked`: the identities of parameters of tracked modules, which are left
    out."""
    yield StateOwner(optimizer.state, None, True)
    own = {"param_groups"} if inner else set[str]()
    custom = not type(optimizer).__module__.startswith("torch.optim.")
    for key, value in vars(optimizer).items() if custom else ():
        if isinstance(value, torch.optim.Optimizer) and not inner and value is not optimizer:
            yield from state_owners(value, tracked, inner=True)
        elif key not in _OF_ALL and not _is_of_others(value, tracked):
            own.add(key)
    if own or custom:
        yield StateOwner(vars(optimizer), frozenset(own), custom)


def _is_of_others(value: Any, tracked: Collection[int]) -> bool:
    if isinstance(value, torch.nn.Module):
        return all(id(p) in tracked for p in value.parameters())
    return isinstance(value, (FunctionType, MethodType, BuiltinFunctionType, type, partial))
