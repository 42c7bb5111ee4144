"""Loads a `state_dict` into a module, without its wrappers, and reports which names the module left out.

Knows torch's modules and nothing of commits. Invariant: for a module that is filled in part, the module's own report of
missing and unexpected names counts, because its hooks may rename, add or consume names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from everstep.checkpoint.state import layouts
from everstep.checkpoint.state.sharding import placed_as
from everstep.torch_private.modules import (
    buffers_of,
    compiled,
    is_normalization,
    load_hooks,
    reads_as_normalization,
    reads_in_own_way,
    unsaved_of,
)

log = logging.getLogger("everstep.checkpoint")


@dataclass(frozen=True, slots=True)
class Answer:
    """A module's report after a load: the names that it did not get, and those that it got and does not know."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def fill(module: torch.nn.Module, tree: dict[str, Any], *, partial: bool) -> Answer | None:
    """Load a `state_dict`: all of it, or with `partial` the names that it has. Then the module's report is returned.

    Raises what the module's `load_state_dict` raises.
    """
    make_writable(module)
    _make_late_buffers(module, tree)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(value := tree.get(name), torch.Tensor) and value.shape == parameter.shape:
            tree[name] = placed_as(parameter, value)
    if not partial:
        module.load_state_dict(tree)
        return None
    given = tuple(tree)  # hooks may take names out of it
    result: Any = module.load_state_dict(tree, strict=False)
    if hasattr(result, "missing_keys") and hasattr(result, "unexpected_keys"):
        return Answer(tuple(result.missing_keys), tuple(result.unexpected_keys))
    # The class has its own `load_state_dict`, which reports nothing. So the names are compared.
    own = module.state_dict()
    return Answer(tuple(n for n in own if n not in given), tuple(n for n in given if n not in own))


def make_writable(module: torch.nn.Module) -> None:
    """Give new memory to buffers that `load_state_dict` cannot write to: expanded ones, whose elements share memory,
    and those that were made in inference mode."""
    for part in module.modules():
        own = buffers_of(part)
        for name, buffer in own.items():
            if buffer is not None and layouts.is_dense(buffer) and 0 in buffer.stride():
                own[name] = buffer.contiguous()
            elif buffer is not None and buffer.is_inference():
                own[name] = buffer.clone()


def make_buffer(part: torch.nn.Module, name: str, like: torch.Tensor | None, shape: Any, dtype: torch.dtype) -> None:
    """Make a buffer of zeros, for a value that is about to be loaded, on the device of `like`."""
    buffers_of(part)[name] = torch.zeros(shape, dtype=dtype, device=like.device if like is not None else None)


def _make_late_buffers(module: torch.nn.Module, tree: dict[str, Any]) -> None:
    """Make the buffers that are None until the first forward pass and that have a value in `tree`."""
    late = late_buffers(module)
    for path, part in module.named_modules() if late else ():
        for name in _kept(part):
            full = f"{path}." * bool(path) + name
            if full in late and isinstance(value := tree.get(full), torch.Tensor):
                like = next((p for m in (part, module) for p in m.parameters()), None)
                make_buffer(part, name, like, value.shape, value.dtype)
                log.info("buffer %s was None, and is made as the commit has it", full)


def buffer_names(module: torch.nn.Module) -> tuple[str, ...]:
    """The names of the module's buffers in a `state_dict`. Buffers that are None are included, although a `state_dict`
    does not have them."""
    return tuple(f"{path}." * bool(path) + name for path, part in module.named_modules() for name in _kept(part))


def late_buffers(module: torch.nn.Module) -> frozenset[str]:
    """The names of buffers that are None, except where a setting of a torch module makes them None
    (`track_running_stats`)."""
    return unset_buffers(
        module, lambda part: not type(part).__module__.startswith("torch.") and not is_normalization(part)
    )


def unset_buffers(module: torch.nn.Module, of: Callable[[torch.nn.Module], bool] = lambda part: True) -> frozenset[str]:
    """The names of buffers that are None, in the modules for which `of` is true."""
    parts = ((path, part) for path, part in module.named_modules() if of(part))
    return frozenset(
        f"{path}." * bool(path) + name for path, part in parts for name in _kept(part) if buffers_of(part)[name] is None
    )


def _kept(part: torch.nn.Module) -> list[str]:
    return [name for name in buffers_of(part) if name not in unsaved_of(part)]


def is_free(name: str, free: tuple[str, ...]) -> bool:
    """Whether `name` is one of the names in `free`, or below one that ends with a dot; "" matches every name."""
    return any(name == entry or not entry or (entry.endswith(".") and name.startswith(entry)) for entry in free)


def migrated(module: torch.nn.Module) -> tuple[str, ...]:
    """The names, for `is_free`, that a module reads from a `state_dict` in its own way: it may rename those of old
    versions, or do without some. Whether they fit, only the module itself finds out while it loads."""
    if type(module).load_state_dict is not torch.nn.Module.load_state_dict or "load_state_dict" in vars(module):
        return ("",)
    names = []
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        if reads_as_normalization(part):
            names.append(f"{prefix}num_batches_tracked")  # absent in old ones
        elif reads_in_own_way(part):
            names.append(prefix)
        extra = (type(part).get_extra_state, type(part).set_extra_state)
        if extra != (torch.nn.Module.get_extra_state, torch.nn.Module.set_extra_state):
            names.append(f"{prefix}_extra_state")  # of any kind and size: FP8 modules have none before their first step
        # FSDP2's hook changes no names: it makes sure that the parameters are sharded.
        if any(not getattr(hook, "__module__", "").startswith("torch.distributed.") for hook in load_hooks(part)):
            names.append(prefix)
    return tuple(names)


def bare(target: Any) -> Any:
    """The module without the wrappers that rename its parameters: DDP, DataParallel, torch.compile."""
    while isinstance(target, torch.nn.Module):
        if isinstance(target, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            target = target.module
        elif (inner := compiled(target)) is not None:
            target = inner
        else:
            break
    return target
