"""The members of the present round, as the checkpoint engine and we ourselves talk to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from everstep.checkpoint.ranks import Broadcasting
from everstep.recovery.group.collectives import gather_over, reduce_into
from everstep.recovery.group.recoverable import RecoverableGroup


class Members(Broadcasting):
    """A `checkpoint.Ranks` over a `RecoverableGroup` that c10d does not know of. Raises `PeerLost` where a member is
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
        """Every rank's values, by rank; as many of each, of at most 63 bits."""
        return gather_over(values, self.group)

    def any(self, values: Sequence[bool], places: int = 1) -> list[bool]:
        """Of each of them, whether it is so on any rank; as many on each. With `places` above 1: on any rank that has
        this one's place, `rank % places`; as many on each of these."""
        if places > 1:
            # One more, because there may be none at all, and gloo gathers no tensors without elements.
            padded = [*values, *[False] * (self.maximum(len(values)) + 1 - len(values))]
            told = self.gather([int(value) for value in padded])[self.rank % places :: places]
            return [any(column) for column in list(zip(*told, strict=True))[: len(values)]]
        if self.world_size == 1 or not values:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.uint8)
        reduce_into(tensor, dist.ReduceOp.MAX, self.group).wait()
        return [bool(value) for value in tensor.tolist()]

    def broadcast(self, data: torch.Tensor, source: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self.group.broadcast([data], options)
