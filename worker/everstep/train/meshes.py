"""The mesh that a script shards its model over, in each kind of world.

Where peers may be lost it is ours, and lasts from round to round; elsewhere it is torch's own. Invariant: it has two
dimensions, "replicate" and "shard", and neighbours in rank hold the shards of one replica.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from everstep.contract import env
from everstep.train.recovery.mesh import NAMES
from everstep.train.recovery.recovery import Recovery
from everstep.train.step import LoopError
from everstep.train.world import Place


def likely_rank(environ: Mapping[str, str]) -> int:
    """That of the round in which the process was started; else what it would be if all workers were there. Only a job
    that begins needs it to be right: later the state comes from others."""
    if int(environ.get("WORLD_SIZE", "1")) > 1:
        return int(environ.get("RANK", "0"))
    worker, processes = int(environ.get(env.WORKER_INDEX, "0")), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    return worker * processes + int(environ.get("LOCAL_RANK", "0"))


def make_mesh(place: Place, recovery: Recovery | None, shard: int) -> Any:
    """Of `shard` shards. A process that runs alone, without a launcher, holds all of them as one."""
    if shard < 1:
        raise LoopError(f"mesh(shard={shard}): the number of shards, 1 or more, is expected")
    if recovery is not None:
        return recovery.mesh(shard, likely_rank(os.environ), place.device.type)
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  few scripts shard

    if not dist.is_initialized():
        dist.init_process_group(
            "gloo" if place.device.type == "cpu" else "nccl", store=HashStore(), rank=0, world_size=1
        )
        atexit.register(dist.destroy_process_group)
        shard = 1
    if place.world_size % shard:
        raise LoopError(f"mesh(shard={shard}): {place.world_size} processes are no whole replicas; start a multiple")
    return init_device_mesh(place.device.type, (place.world_size // shard, shard), mesh_dim_names=NAMES)
