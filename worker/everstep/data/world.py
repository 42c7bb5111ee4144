"""Which rank this process is, where a script does not say so."""

from __future__ import annotations

import os

import torch.distributed as dist

from everstep.data.errors import BatchUnusable
from everstep.data.plan.assignment import World


def world_of(rank: int | None, world_size: int | None) -> World:
    """The given rank and size; else torch.distributed's; else those of torchrun's environment; else rank 0 of 1."""
    if rank is not None and world_size is not None:
        return World(rank, world_size)
    if rank is not None or world_size is not None:
        raise BatchUnusable(f"rank {rank} of a world of {world_size}: pass both, or neither")
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
