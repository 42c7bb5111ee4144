"""Modules: their own tables, what they read of a `state_dict`, and those that are compiled."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

TABLES = ("_modules", "_parameters", "_buffers")  # the attributes that a module has its parts in


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The table of a module's own parameters, which it reads in each forward pass. It may be changed."""
    return _table(module._parameters)


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The table of a module's own buffers. It may be changed."""
    return _table(module._buffers)


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The table of a module's children, by name; one child may be in it twice."""
    return _table(module._modules)


def _table(own: Any) -> dict[str, Any]:
    """A module of TorchScript has no dictionary, but a view that lists its names; the copy has the same tensors."""
    return own if isinstance(own, dict) else dict(own.items())


def tables_of(value: Any) -> list[dict[str, Any]]:
    """The tables of children, parameters and buffers of any object: empty where it has none, as what is no module, and
    a module whose `__init__` has not been called. No code of its class is called."""
    own = vars(value) if isinstance(value, torch.nn.Module) else {}
    return [own.get(table, {}) for table in TABLES]


def unsaved_of(module: torch.nn.Module) -> set[str]:
    """The names of a module's own buffers that its `state_dict` leaves out."""
    return module._non_persistent_buffers_set


def hooks_of(module: torch.nn.Module) -> list[dict[int, Any]]:
    """The tables of a module's forward and backward hooks, by the numbers that torch gives all hooks in turn."""
    return [
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    ]  # fmt: skip


def is_normalization(module: torch.nn.Module) -> bool:
    """Whether it is a batch norm or an instance norm, of any dimension."""
    return isinstance(module, torch.nn.modules.batchnorm._NormBase)


def reads_as_normalization(module: torch.nn.Module) -> bool:
    """Whether it reads a `state_dict` as torch's batch norms do, of which old ones lack a name."""
    return type(module)._load_from_state_dict is torch.nn.modules.batchnorm._NormBase._load_from_state_dict


def reads_in_own_way(module: torch.nn.Module) -> bool:
    """Whether its class has a way of its own to read a `state_dict`."""
    return type(module)._load_from_state_dict is not torch.nn.Module._load_from_state_dict


def load_hooks(module: torch.nn.Module) -> list[Any]:
    """The functions that a module calls before it reads a `state_dict`."""
    return [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]


def versions_in(tree: Any) -> Mapping[str, Any] | None:
    """The versions of the modules' own formats in a `state_dict`; None if it has none."""
    metadata: Mapping[str, Any] | None = getattr(tree, "_metadata", None)
    return metadata


def is_state_dict(target: Any) -> bool:
    """Whether it is what a module's `state_dict` gives."""
    return hasattr(target, "_metadata")


def set_versions(tree: Any, versions: Any) -> None:
    """Give a `state_dict` the versions by which `load_state_dict` migrates old formats."""
    tree._metadata = versions


def compiled(module: Any) -> Any:
    """The module that torch.compile has wrapped; None for one that it has not."""
    return getattr(module, "_orig_mod", None)


def all_compiled() -> Iterator[Any]:
    """All modules of this process that torch.compile has wrapped. torch.compile is not imported for it."""
    if "torch._dynamo" in sys.modules:
        wrapper = torch._dynamo.eval_frame.OptimizedModule
        yield from (compiled._orig_mod for compiled in gc.get_objects() if type(compiled) is wrapper)
