"""Assigns samples to ranks: from a position in the epoch to the samples, micro-batches and weights of one rank.

Pure arithmetic on positions; knows no dataset and no order. Invariants, at every world size:

- A step's samples are the next `global_batch` positions; only the last step of an epoch may have fewer.
- The ranks' shares are contiguous, in rank order, disjoint, and together the whole step: no padding, nothing twice.
- All ranks have the same number of micro-batches in a step, so they meet in the same collectives.
- DDP averages gradients over ranks. With each micro-batch's mean loss scaled by its weight, that average is the
  gradient of the mean loss over the whole step: weight = count * world_size / global_count.

Where a step has fewer samples than there are places for them (ranks times micro-batches), a place without one gets the
step's first sample as a filler with weight 0: it keeps the rank in the collective and adds nothing to the gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from everstep.data.errors import BatchUnusable, DataError, DatasetUnusable


@dataclass(frozen=True, slots=True)
class World:
    """One rank's place among all."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise BatchUnusable(f"rank {self.rank} of a world of {self.size}: ranks go from 0 to world_size - 1")


@dataclass(frozen=True, slots=True)
class Epoch:
    """How an epoch of `n` samples is cut into steps. `drop_last`: leave out the last step if it is not full."""

    n: int
    global_batch: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise BatchUnusable(f"global_batch={self.global_batch}: at least 1 sample a step is expected")
        if self.drop_last and self.n < self.global_batch:
            raise DatasetUnusable(
                f"the dataset has {self.n} samples, less than one global_batch={self.global_batch}, and drop_last=True"
                " leaves none: pass a smaller global_batch, or drop_last=False"
            )

    @property
    def length(self) -> int:
        """The samples of an epoch that are used."""
        return self.n - self.n % self.global_batch if self.drop_last else self.n

    @property
    def steps(self) -> int:
        """Steps of an epoch that begins at its first sample."""
        return -(-self.length // self.global_batch)


@dataclass(frozen=True, slots=True)
class Step:
    """The samples [first, first + count) of an epoch's order: what one optimizer step learns from."""

    number: int
    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class Share:
    """One micro-batch of one rank: positions [first, first + rows), of which `count` count (0: a filler)."""

    step: Step
    micro: int
    micros: int
    first: int
    count: int
    weight: float

    @property
    def rows(self) -> int:
        """How many samples are read: `count`, or 1 for a filler."""
        return max(self.count, 1)


def whole(name: str, value: Any) -> int:
    """`value`, which may be a numpy integer, as an int. Raises DataError for what is no whole number."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise DataError(f"{name}={value!r}: a whole number is expected, not a {type(value).__name__}")


def check_batch(global_batch: int, world_size: int, micro_batch: int | None) -> None:
    """Raises BatchUnusable for a batch that this world cannot train on."""
    if global_batch < world_size:
        raise BatchUnusable(
            f"global_batch={global_batch} is smaller than the world of {world_size} ranks: some would have nothing to"
            f" do in every step. Pass global_batch={world_size} or more, or use at most {global_batch} ranks"
        )
    if micro_batch is not None and micro_batch < 1:
        raise BatchUnusable(f"micro_batch={micro_batch}: at least 1 sample is expected, or None for no micro-batches")


def steps(epoch: Epoch, index: int) -> Iterator[Step]:
    """The steps of the rest of an epoch, from sample `index` on."""
    while index < epoch.length:
        step = Step(index // epoch.global_batch, index, min(epoch.global_batch, epoch.length - index))
        yield step
        index = step.end


def part(count: int, index: int, parts: int) -> tuple[int, int]:
    """The offset and size of part `index` of `count` things cut into `parts`: the first ones have the one more."""
    size, more = divmod(count, parts)
    return index * size + min(index, more), size + (index < more)


def shares(step: Step, world: World, micro_batch: int | None = None) -> tuple[Share, ...]:
    """One rank's micro-batches of a step, at most `micro_batch` samples each; one if that is None."""
    offset, size = part(step.count, world.rank, world.size)
    largest = -(-step.count // world.size)
    micros = -(-largest // micro_batch) if micro_batch else 1
    shares = []
    for micro in range(micros):
        within, count = part(size, micro, micros)
        first = step.first + offset + within if count else step.first
        shares.append(Share(step, micro, micros, first, count, weight(count, world.size, step.count)))
    return tuple(shares)


def weight(count: int, world_size: int, global_count: int) -> float:
    """The factor for the mean loss over `count` samples of a step of `global_count`, under DDP's average over ranks."""
    return count * world_size / global_count
