"""Collectives of a few numbers, over a group that need not be registered with c10d."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d


def reduce_into(values: torch.Tensor, operation: Any, group: Any) -> Any:
    """Begin to reduce `values` over the group; `wait()` ends it."""
    options = c10d.AllreduceOptions()
    options.reduceOp = operation
    return group.allreduce([values], options)


def gather_over(values: Sequence[int], group: Any) -> list[tuple[int, ...]]:
    """Every rank's values, by rank. Each rank gives the same number of values, of at most 63 bits."""
    return [tuple(t.tolist()) for t in all_gather(torch.tensor(values, dtype=torch.int64), group)]


def all_gather(data: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Every rank's tensor, by rank. All have one shape and type."""
    outputs = [torch.zeros_like(data) for _ in range(group.size())]
    group.allgather([outputs], [data]).wait()
    return outputs
