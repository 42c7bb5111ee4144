"""Torch's `join` for uneven inputs: its switch, and what a rank without inputs does for a DDP object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _DDPJoinHook

from everstep.torch_private.patches import replace

DDPJoinHook = _DDPJoinHook  # DDP's class of hooks: Join looks for nothing else


def is_enabled(join: Any) -> bool:
    """Whether the join does anything."""
    return bool(join._enable)


def enable(join: Any, *, on: bool) -> None:
    """Switch the join on or off, also in what it joins."""
    join._enable = on
    join._set_joinable_configs()


def hooks_of(join: Any) -> Iterable[Any]:
    """The hooks of what it joins."""
    hooks: Iterable[Any] = join._join_hooks
    return hooks


def joined_by(join: Any) -> Iterable[Any]:
    """What it joins: DDP objects, optimizers."""
    joinables: Iterable[Any] = join._joinables
    return joinables


def replace_pass_check(check: Callable[[Any, bool], None]) -> None:
    """Replace the method that DDP calls in a forward pass inside of a join, by `check(ddp, is_joined_rank)`."""
    replace("_check_global_requires_backward_grad_sync", lambda _: check, DistributedDataParallel)


def sync_buffers(ddp: Any) -> None:
    """Take rank 0's buffers, as a forward pass does where DDP is made so. Collective."""
    ddp._check_and_sync_module_buffers()


def run_hook(ddp: Any, bucket: Any) -> Any:
    """Begin to average a bucket, by the registered hook if there is one; `wait()` gives the result."""
    return ddp.reducer._run_comm_hook(bucket)


def used_map(ddp: Any) -> torch.Tensor:
    """Zeros in the form of the reducer's map of used parameters. Its own map would keep an answer until its next
    pass."""
    return torch.zeros_like(ddp.reducer._get_local_used_map())


def rank_of(ddp: Any) -> int:
    """This process's rank in the DDP object's group, as when the object was made."""
    return int(ddp._distributed_rank)


def sync_parameters(ddp: Any, is_last_joiner: bool) -> None:
    """Give the last rank's parameters to all. Collective."""
    ddp._sync_final_model(is_last_joiner)


def send_buffers(ddp: Any, source: int) -> None:
    """Give the buffers of rank `source` to all. They count as unchanged. Collective."""
    ddp._assign_modules_buffers()
    buffers: Sequence[torch.Tensor] = ddp.modules_buffers
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffers)):
        ddp._sync_module_buffers(source)
