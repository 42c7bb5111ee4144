"""What a loader yields: the samples, and what a training loop has to know about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from everstep.data.errors import BatchUnusable
from everstep.data.permutation import Indices

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Generic[T]):
    """One rank's samples of a step, or one micro-batch of them.

    `data`: what `collate_fn` made. `indices`: the dataset index of each row. `count`: how many rows count; 0 means one
    filler row, to be run through the model like any other so that this rank joins the collectives. `weight`: scale the
    *mean* loss over the rows by it, and the gradient that DDP averages is that of the mean over all `global_count`
    samples of the step. `step`: in this epoch, from 0. `micro` of `micros`, from 0.
    """

    data: T
    epoch: int
    step: int
    indices: Indices
    count: int
    global_count: int
    weight: float
    micro: int = 0
    micros: int = 1

    @property
    def last(self) -> bool:
        """Whether the optimizer steps after this micro-batch. Before it, DDP's `no_sync` saves the all-reduces."""
        return self.micro == self.micros - 1

    def __iter__(self) -> NoReturn:
        raise BatchUnusable(
            "a step gives a Batch, which is not unpacked as what a DataLoader gives, because its weight would be lost:"
            " write `with step as batch:`, `x, y = batch.data` and `batch.scale(loss).backward()`, for a DataLoader as"
            " for what run.loader(…) makes"
        )

    def scale(self, loss: Any) -> Any:
        """The mean loss over this batch's rows, weighted: call `backward` on it."""
        return loss * self.weight
