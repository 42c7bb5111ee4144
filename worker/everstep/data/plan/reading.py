"""The reading plan: the samples that one rank reads from a position on, in order, for the loader and for simulations.

Pure: order plus assignment, no dataset. Samples are looked up for many steps at a time, because the order costs tens of
nanoseconds a sample in bulk and much more one by one; how many are looked up ahead changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from everstep.data.plan.assignment import Epoch, Share, World, shares, steps
from everstep.data.plan.order import Order
from everstep.data.plan.permutation import Indices

LOOK_AHEAD: Final = 4096  # samples


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """One micro-batch to read: the samples of a share. The first `share.count` of `samples` count."""

    share: Share
    samples: Indices


def reads(epoch: Epoch, order: Order, index: int, world: World, micro_batch: int | None = None) -> Iterator[Read]:
    """A rank's micro-batches from sample `index` of the epoch to its end."""
    ahead: list[Share] = []
    rows = 0
    for step in steps(epoch, index):
        for share in shares(step, world, micro_batch):
            ahead.append(share)
            rows += share.rows
        if rows >= LOOK_AHEAD:
            yield from _look_up(order, ahead)
            ahead, rows = [], 0
    yield from _look_up(order, ahead)


def _look_up(order: Order, ahead: list[Share]) -> Iterator[Read]:
    if not ahead:
        return
    positions = np.concatenate([np.arange(s.first, s.first + s.rows, dtype=np.int64) for s in ahead])
    ends = np.cumsum([s.rows for s in ahead])
    for share, samples in zip(ahead, np.split(order.take(positions), ends[:-1]), strict=True):
        yield Read(share, samples)
