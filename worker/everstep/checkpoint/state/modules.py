"""How a module takes a `state_dict`: without its wrappers, in its own form, and what it says that it left out.

Knows torch's modules and nothing of commits. Invariant: a module that is filled in part is asked what was missing and
what it did not expect; its own word counts, because hooks may rename, make up or consume names.
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
    """The names that a module says it did not get, and those that it got and has no place for."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def fill(module: torch.nn.Module, tree: dict[str, Any], *, partial: bool) -> Answer | None:
    """Load a `state_dict`: all of it, or with `partial` what there is, and then what the module left out.

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
    told: Any = module.load_state_dict(tree, strict=False)
    if hasattr(told, "missing_keys") and hasattr(told, "unexpected_keys"):
        return Answer(tuple(told.missing_keys), tuple(told.unexpected_keys))
    # A `load_state_dict` of the class's own that says nothing: then the names have to do.
    own = module.state_dict()
    return Answer(tuple(n for n in own if n not in given), tuple(n for n in given if n not in own))


def make_writable(module: torch.nn.Module) -> None:
    """Give buffers memory of their own that `load_state_dict` cannot write to: expanded ones, in which one number shows
    many times, and those that were made in inference mode."""
    for part in module.modules():
        own = buffers_of(part)
        for name, buffer in own.items():
            if buffer is not None and layouts.is_dense(buffer) and 0 in buffer.stride():
                own[name] = buffer.contiguous()
            elif buffer is not None and buffer.is_inference():
                own[name] = buffer.clone()


def make_buffer(part: torch.nn.Module, name: str, like: torch.Tensor | None, shape: Any, dtype: torch.dtype) -> None:
    """A buffer of zeros, for a value that is about to be loaded. `like`: it is to be on the same device."""
    buffers_of(part)[name] = torch.zeros(shape, dtype=dtype, device=like.device if like is not None else None)


def _make_late_buffers(module: torch.nn.Module, tree: dict[str, Any]) -> None:
    """Make those that are None until the first forward pass, and for which there is a value."""
    late = late_buffers(module)
    for path, part in module.named_modules() if late else ():
        for name in _kept(part):
            full = f"{path}." * bool(path) + name
            if full in late and isinstance(value := tree.get(full), torch.Tensor):
                like = next((p for m in (part, module) for p in m.parameters()), None)
                make_buffer(part, name, like, value.shape, value.dtype)
                log.info("buffer %s was None, and is made as the commit has it", full)


def buffer_names(module: torch.nn.Module) -> tuple[str, ...]:
    """The names that its buffers have in a `state_dict`, also of those that are None and so not in it."""
    return tuple(f"{path}." * bool(path) + name for path, part in module.named_modules() for name in _kept(part))


def late_buffers(module: torch.nn.Module) -> frozenset[str]:
    """The names of buffers that are None, and not by a setting of one of torch's modules (`track_running_stats`)."""
    return unset_buffers(
        module, lambda part: not type(part).__module__.startswith("torch.") and not is_normalization(part)
    )


def unset_buffers(module: torch.nn.Module, of: Callable[[torch.nn.Module], bool] = lambda part: True) -> frozenset[str]:
    """The names of buffers that are None. `of`: whose."""
    parts = ((path, part) for path, part in module.named_modules() if of(part))
    return frozenset(
        f"{path}." * bool(path) + name for path, part in parts for name in _kept(part) if buffers_of(part)[name] is None
    )


def _kept(part: torch.nn.Module) -> list[str]:
    return [name for name in buffers_of(part) if name not in unsaved_of(part)]


def is_free(name: str, free: tuple[str, ...]) -> bool:
    """Whether `name` is one of these, or below one that ends with a dot; "" is everything."""
    return any(name == one or not one or (one.endswith(".") and name.startswith(one)) for one in free)


def migrated(module: torch.nn.Module) -> tuple[str, ...]:
    """The names that a module reads from a `state_dict` in its own way, for `is_free`: renames of old versions, names
    that may be absent. What fits there only the module itself can say, while it loads."""
    if type(module).load_state_dict is not torch.nn.Module.load_state_dict or "load_state_dict" in vars(module):
        return ("",)
    found = []
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        if reads_as_normalization(part):
            found.append(f"{prefix}num_batches_tracked")  # absent in old ones
        elif reads_in_own_way(part):
            found.append(prefix)
        extra = (type(part).get_extra_state, type(part).set_extra_state)
        if extra != (torch.nn.Module.get_extra_state, torch.nn.Module.set_extra_state):
            found.append(f"{prefix}_extra_state")  # of any kind and size: FP8 modules have none before their first step
        # FSDP2's only sees to it that the parameters are sharded.
        if any(not getattr(hook, "__module__", "").startswith("torch.distributed.") for hook in load_hooks(part)):
            found.append(prefix)
    return tuple(found)


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
