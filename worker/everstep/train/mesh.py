"""Makes the mesh over which a script shards its model, in each kind of world.

In a world that may lose peers, the mesh is ours, and lasts from round to round. Otherwise it is torch's own. Invariant:
it has two dimensions, "replicate" and one of "shard", "tensor" and "model", and neighbours in rank hold the shards of
one replica.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

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
