"""Averages gradients over the replicas of a model that is sharded by tensor parallelism.

DistributedDataParallel of torch 2.13 cannot do that: it removes the sharded parameters from the module (ADR 0017).

Invariants: values that are equal on all ranks of a replica are summed in the same order on all of them, so they stay
equal; a parameter that has a gradient on some replicas has one on all of them afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from everstep.checkpoint.state.sharding import is_sharded, local_of
from everstep.recovery.state.shape import REPLICATE

BYTES = 2**25  # of one sum; a larger tensor is summed alone


@torch.no_grad()
def average(modules: Iterable[torch.nn.Module], mesh: Any) -> None:
    """Average the gradients over `mesh["replicate"]`, in place. Collective."""
    parameters = list({id(p): p for module in modules for p in module.parameters() if p.requires_grad}.values())
    for parameter in parameters:
        _add_up(parameter)
    group = mesh.get_group(REPLICATE)
    replicas = dist.get_world_size(group)
    if replicas == 1:
        return
    _agree_which(parameters, group)
    present = [p for p in parameters if p.grad is not None]
    # Shards are summed separately: their sizes may differ between ranks, which would change the order of other sums.
    for cut in (False, True):
        for bucket in _buckets([_local(p.grad) for p in present if _is_cut(p) is cut]):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            dist.all_reduce(flat, group=group)
            flat /= replicas
            means = torch.split(flat, [grad.numel() for grad in bucket])
            for grad, mean in zip(bucket, means, strict=True):
                grad.copy_(mean.view_as(grad))


def _add_up(parameter: Any) -> None:
    """Complete partial gradients. A rank that has seen only a part of the data (the weights of a norm, if the sequence
    is sharded) has only a part of the sum."""
    grad = parameter.grad
    if is_sharded(grad) and is_sharded(parameter) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


def _agree_which(parameters: Sequence[Any], group: Any) -> None:
    """Give a parameter a gradient on all replicas if it has one on any."""
    there = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    if not parameters:
        return
    dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
    for parameter, has in zip(parameters, there.tolist(), strict=True):
        if has and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _is_cut(parameter: Any) -> bool:
    return is_sharded(parameter) and any(p.is_shard() for p in parameter.placements)


def _local(grad: Any) -> torch.Tensor:
    """The local tensor; a change of it changes the gradient."""
    local: Any = local_of(grad)
    waited: torch.Tensor = local.trigger_wait() if hasattr(local, "trigger_wait") else local
    return waited


def _buckets(grads: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Buckets of tensors of one type and device each."""
    bucket: list[torch.Tensor] = []
    size = 0
    for grad in grads:
        of = grad.numel() * grad.element_size()
        if bucket and (size + of > BYTES or (grad.dtype, grad.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += of
    if bucket:
        yield bucket
