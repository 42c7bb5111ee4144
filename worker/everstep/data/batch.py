"""The batch that a loader yields: its samples, and what a training loop needs to know about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, NoReturn, TypeVar

import torch

from everstep.data.errors import BatchUnusable
from everstep.data.plan.permutation import Indices
from everstep.data.plan.reading import Read

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Weight:
    """Of a batch's mean loss. `read`: whether anybody has read it."""

    value: float
    read: bool = False


class BatchLacks(BatchUnusable, AttributeError):
    """A Batch was used in place of its data. `hasattr` and the like hear that there is no such attribute."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Generic[T]):
    """One rank's samples of a step, or one micro-batch of them.

    `data`: what `collate_fn` made. `indices`: the dataset index of each row. `count`: how many rows count; 0 means one
    filler row, to be run through the model like any other so that this rank joins the collectives. `step`: in this
    epoch, from 0. `micro` of `micros`, from 0.
    """

    data: T
    epoch: int
    step: int
    indices: Indices
    count: int
    global_count: int
    weighing: Weight
    micro: int = 0
    micros: int = 1

    @property
    def weight(self) -> float:
        """Scale the *mean* loss over the rows by it, and the gradient that DDP averages is that of the mean over all
        `global_count` samples of the step."""
        self.weighing.read = True
        return self.weighing.value

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

    def __getitem__(self, key: Any) -> NoReturn:
        raise BatchUnusable(f"batch[{key!r}]: what the loader gives is in `batch.data`. Write `batch.data[{key!r}]`")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BatchLacks(f"batch.{name}: what the loader gives is in `batch.data`. Write `batch.data.{name}`")

    def keys(self) -> NoReturn:
        """For `model(**batch)`."""
        raise BatchUnusable("a Batch is no mapping: what the loader gives is in `batch.data`. Write `**batch.data`")

    def to(self, device: Any) -> Batch[T]:
        """This batch with the tensors of its `data` on a device; those of pinned memory are copied in the background.

        Tensors are found in lists, tuples and mappings. Anything else that has a `to` is asked for it.
        """
        return replace(self, data=_moved(self.data, device))

    def scale(self, loss: Any) -> Any:
        """The mean loss over this batch's rows, weighted: call `backward` on it."""
        return loss * self.weight


def _moved(data: Any, device: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=data.is_pinned())
    if hasattr(data, "to"):
        return data.to(device)
    if isinstance(data, tuple) and hasattr(data, "_fields"):  # a named one
        return type(data)(*(_moved(part, device) for part in data))
    if isinstance(data, list | tuple):
        return type(data)(_moved(part, device) for part in data)
    if isinstance(data, Mapping):
        return {key: _moved(part, device) for key, part in data.items()}
    return data


def batch_of(data: Any, epoch: int, read: Read) -> Batch[Any]:
    """The batch of a read that was handed out."""
    share = read.share
    return Batch(
        data=data,
        epoch=epoch,
        step=share.step.number,
        indices=read.samples,
        count=share.count,
        global_count=share.step.count,
        weighing=Weight(share.weight),
        micro=share.micro,
        micros=share.micros,
    )
