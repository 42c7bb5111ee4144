"""Sharded state: FSDP2's records of modules and parameters, and the local part of a DTensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch


def is_fully_sharded(module: Any) -> bool:
    """Whether `fully_shard` was called with this module."""
    return hasattr(module, "_get_fsdp_state")


def is_root(module: Any) -> bool:
    """Whether no other fully sharded module contains this one. True as long as no forward pass has found out."""
    return module._get_fsdp_state()._is_root is not False


def shards_of(module: Any) -> Iterator[Any]:
    """FSDP2's own records of a module's parameters; none for modules that are not fully sharded."""
    if is_fully_sharded(module):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            yield from group.fsdp_params


def forget_gathers(root: Any) -> None:
    """Forget gathers of parameters whose works have failed or ended, and for which nothing waits."""
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            group._all_gather_result = None


def forget_gradients(parameter: Any) -> None:
    """Forget the gradients of a record's parameter, also those that were not reduced yet."""
    parameter.unsharded_accumulated_grad = None
    with contextlib.suppress(AttributeError):  # before the first forward pass there is none
        parameter._unsharded_param.grad = None
    parameter.sharded_param.grad = None
    parameter.grad_offload_event = None  # of a gradient's copy to the CPU, which nobody waits for


def hold(parameter: Any, shard: int) -> None:
    """Let a record hold another shard of its parameter, of zeros."""
    from torch._prims_common import make_contiguous_strides_for  # noqa: PLC0415  few scripts shard

    parameter.reset_sharded_param()  # the module may have been moved since, or made on `meta`
    axis, size = parameter.fsdp_placement.dim, list(parameter._orig_size)
    info = parameter.mesh_info
    each = -(-size[axis] // info.shard_mesh_size)
    size[axis] = max(0, min(each, size[axis] - shard * each))
    info.shard_mesh_rank = shard
    parameter.sharded_size = torch.Size(size)
    parameter.contiguous_sharded_stride = make_contiguous_strides_for(size)
    padded = parameter._sharded_param_data.zero_().view(parameter.padded_sharded_param_size)
    parameter.sharded_param._local_tensor = padded.narrow(axis, 0, size[axis])


def local(tensor: Any) -> torch.Tensor:
    """The object in which a DTensor has this rank's part. `to_local()` gives another one."""
    local: torch.Tensor = tensor._local_tensor
    return local


def set_local(tensor: Any, part: torch.Tensor) -> None:
    """Give a DTensor another local part."""
    tensor._local_tensor = part


def is_flat(parameter: torch.Tensor) -> bool:
    """Whether it is a flat parameter of FSDP1, each rank's own part of several parameters."""
    return bool(getattr(parameter, "_is_flat_param", False))


def is_taken_apart(parameter: torch.Tensor) -> bool:
    """Whether DDP with `device_mesh=` has taken it out of its module, and knows it by this mark."""
    return hasattr(parameter, "_st_info")


def forget_plans() -> None:
    """Clear torch's cache of how it computed operations of DTensors: it has the shapes of their local parts."""
    import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
