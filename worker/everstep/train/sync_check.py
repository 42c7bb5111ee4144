"""Compares all parameters and gradients of the ranks that should hold the same: `run.check_sync`.

`guards.replicas` reads the first bytes of each parameter in a few steps. This reads all bytes, as often as the script
asks, and says which tensor of which rank is another one: for a run that is suspected of drifting apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from everstep.checkpoint.state.modules import bare
from everstep.checkpoint.state.sharding import is_sharded
from everstep.recovery import digests
from everstep.recovery.errors import LoopError
from everstep.recovery.state.shape import Shape


class SyncCheck:
    """Of what is tracked in `state`. Each rank is compared with the first one that holds the same part of a replica.
    `shape`: of the run's mesh, which may be made later."""

    def __init__(self, state: Mapping[str, Any], shape: Callable[[], Shape]) -> None:
        self._state, self._shape = state, shape

    def __call__(self) -> None:
        """Collective. Raises `LoopError` on all ranks, with the first tensor that differs, and its rank."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        mine = dict(self._digests())
        by_rank: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, mine)
        for rank, theirs in enumerate(by_rank):
            first = rank % self._shape().shards
            differing = [name for name in sorted(by_rank[first].keys() | theirs.keys())
                         if by_rank[first].get(name) != theirs.get(name)]  # fmt: skip
            if differing:
                raise LoopError(
                    f"run.check_sync(): rank {rank} has another {differing[0]} than rank {first}, of "
                    f"{len(differing)} of {len(theirs)} tensors that differ. Look at what is done to it by rank: an "
                    "update that only some ranks make, gradients that nobody averages, random numbers or data that "
                    "decide differently on each rank"
                )

    def _digests(self) -> Iterator[tuple[str, int]]:
        """Of each parameter, and of each gradient that is there; of what is cut over the ranks this rank's part."""
        for key, value in self._state.items():
            if not isinstance(value, torch.nn.Module):
                continue
            for name, p in bare(value).named_parameters():
                if is_sharded(p) and self._shape().shards == 1:
                    continue  # over a mesh that is not the run's: nobody says which ranks hold the same
                yield f"{key}.{name}", digests.content(p)
                if p.grad is not None:
                    yield f"the gradient of {key}.{name}", digests.content(p.grad)
