"""Collectives among the members of the present round, for the checkpoint engine and for recovery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from everstep.checkpoint.ranks import Broadcasting
from everstep.recovery.group.collectives import all_gather, gather_over, reduce_into
from everstep.recovery.group.recoverable import RecoverableGroup


class Members(Broadcasting):
    """A `checkpoint.Ranks` over a `RecoverableGroup` that is not registered with c10d. Raises `PeerLost` if a member is
    gone."""

    def __init__(self, group: RecoverableGroup) -> None:
        self.group = group

    @property
    def rank(self) -> int:  # type: ignore[override]  # it changes with the round
        return self.group.rank()

    @property
    def world_size(self) -> int:
        return self.group.size()

    def maximum(self, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64)
        reduce_into(tensor, dist.ReduceOp.MAX, self.group).wait()
        return int(tensor.item())

    def gather(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's values, by rank. Each rank gives the same number of values, of at most 63 bits."""
        return gather_over(values, self.group)

    def all_gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        return all_gather(data, self.group)

    def any(self, values: Sequence[bool], model_size: int = 1) -> list[bool]:
        """For each value, whether it is true on any rank; all ranks give the same number of values. With `model_size`
        above 1, only ranks with this rank's place, `rank % model_size`, count, and only these must give the same
        number."""
        if model_size > 1:
            # One more than needed, because gloo cannot gather empty tensors.
            padded = [*values, *[False] * (self.maximum(len(values)) + 1 - len(values))]
            gathered = self.gather([int(value) for value in padded])[self.rank % model_size :: model_size]
            return [any(column) for column in list(zip(*gathered, strict=True))[: len(values)]]
        if self.world_size == 1 or not values:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.uint8)
        reduce_into(tensor, dist.ReduceOp.MAX, self.group).wait()
        return [bool(value) for value in tensor.tolist()]

    def broadcast(self, data: torch.Tensor, source: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self.group.broadcast([data], options)
