"""`hvd.elastic.ElasticSampler`: each sample of an epoch once, over worlds of several sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch

from everstep.recovery.errors import LoopError
from everstep_horovod.world import current


class ElasticSampler(torch.utils.data.Sampler[int]):
    """A share of the dataset's indices for each rank. After a change of the world, the samples of the epoch that were
    not processed are shared anew.

    Pass it to `TorchState`, call `record_batch` behind each batch and before `state.commit()`, and `set_epoch` at the
    end of an epoch. The order is that of Horovod's sampler: `random.Random(seed + epoch)` shuffles the indices, and the
    ranks take them in turn. The last ones of an epoch are filled up with others, so that all ranks have as many.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def reset(self) -> None:
        """Share the rest of the epoch among the ranks of the present world."""
        self.rank, self.num_replicas = current().rank, current().size
        self.remaining_indices = self._order()[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    @property
    def processed_indices(self) -> set[int]:
        """The samples of this epoch that all ranks together have recorded."""
        return set(self._order()[: self.processed_num])

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, from its first sample."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Each rank has processed a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.processed_num = int(state["epoch"]), int(state["processed_num"])
        self.reset()

    def _order(self) -> list[int]:
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)  # noqa: S311  as Horovod's order
        return indices

    def __iter__(self) -> Iterator[int]:
        if (self.rank, self.num_replicas) != (current().rank, current().size):
            raise LoopError(
                "this ElasticSampler is of another world: pass it to hvd.elastic.TorchState(…, sampler=sampler), which "
                "shares the samples anew when the world changes"
            )
        # A loop that begins again in the middle of an epoch has drawn numbers that one without a loss has not.
        current().draw_again()
        filled = list(self.remaining_indices)
        while filled and len(filled) < self.total_size:
            filled += filled[: self.total_size - len(filled)]
        return iter(filled[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
