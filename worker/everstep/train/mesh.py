"""Makes the mesh over which a script shards its model, in each kind of world, and averages over it.

In a world that may lose peers, the mesh is ours, and lasts from round to round. Otherwise it is torch's own. Invariant:
it has two dimensions, "replicate" and one of "shard", "tensor" and "model", and neighbours in rank hold the shards of
one replica.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from everstep.checkpoint.state.sharding import is_sharded, local_of
from everstep.contract import env
from everstep.recovery.engine import Recovery
from everstep.recovery.errors import LoopError
from everstep.recovery.state.model_parts import Naming, naming
from everstep.recovery.state.shape import REPLICATE, Shape
from everstep.train.process_place import ProcessPlace


def likely_rank(environ: Mapping[str, str]) -> int:
    """The rank that this process assumes before its first round: that of its place in its agent's newest round; or else
    of the round for which it was started; or else its rank if all workers were there. With FSDP2 or tensor parallelism,
    it must be right only when a job begins: later the state comes from others."""
    if environ.get(env.LAST_RANK):
        return env.whole_number(environ, env.LAST_RANK, 0)
    if int(environ.get("WORLD_SIZE", "1")) > 1:
        return int(environ.get("RANK", "0"))
    processes, slot = int(environ.get("LOCAL_WORLD_SIZE", "1")), int(environ.get("LOCAL_RANK", "0"))
    return env.rank_if_all_are_there(environ, processes, slot)


def make_mesh(process: ProcessPlace, recovery: Recovery | None, shape: Shape) -> tuple[Shape, Any, Naming]:
    """The mesh, its shape, and the naming of the state in commits. A process without a launcher is alone, and holds all
    shards as one."""
    shape, mesh = _made(process, recovery, shape)
    return shape, mesh, naming(shape, mesh)


def _made(process: ProcessPlace, recovery: Recovery | None, shape: Shape) -> tuple[Shape, Any]:
    if recovery is not None:
        if env.MOST_PROCESSES in os.environ and all(size % shape.shards for size in process.sizes):
            raise LoopError(f"{shape}: the job has {_words(process.sizes)} processes, which are no whole replicas of "
                            f"{shape.shards}: start a multiple of {shape.shards}")  # fmt: skip
        if env.MOST_PROCESSES in os.environ and process.sizes[-1] % shape.model_size:
            raise LoopError(f"{shape}: the job may come to have {process.sizes[-1]} processes, which are no whole "
                            f"replicas of {shape.model_size}: let the largest world be a multiple of "
                            f"{shape.model_size} (--nnodes, --nproc-per-node)")  # fmt: skip
        return shape, recovery.mesh(shape.shards, likely_rank(os.environ), process.device.type, shape.kind)
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  few scripts shard

    if not dist.is_initialized():
        dist.init_process_group(
            "gloo" if process.device.type == "cpu" else "nccl", store=HashStore(), rank=0, world_size=1
        )
        atexit.register(dist.destroy_process_group)
        shape = Shape(shape.kind)
    if process.world_size % shape.shards:
        raise LoopError(
            f"{shape}: {process.world_size} processes are no whole replicas of {shape.shards}: start a multiple of "
            f"{shape.shards} (--nnodes, --nproc-per-node, or replicas of a TrainingJob)"
        )
    sizes = (process.world_size // shape.shards, shape.shards)
    return shape, init_device_mesh(process.device.type, sizes, mesh_dim_names=(REPLICATE, shape.kind))


def _words(sizes: range) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


# --- averaging
# Averages gradients over the replicas. DistributedDataParallel of torch 2.13 cannot do that for a model that is sharded
# by tensor parallelism: it removes the sharded parameters from the module (ADR 0017). Invariants: values that are equal
# on all ranks of a replica are summed in the same order on all of them, so they stay equal; a parameter that has a
# gradient on some replicas has one on all of them afterwards.

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
