"""Randomness belongs to the sample: the same augmentation at any world size, and the trainer's generators untouched."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from everstep.data import DataError, ElasticLoader, sample_rng
from everstep.data.order import Shuffled, order_of


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return index


class Noisy(Numbers):
    """Sample i, and what the three global generators and the sample's own draw for it."""

    def __getitem__(self, index: int) -> Any:
        own = sample_rng().integers(2**31)
        return index, random.randrange(2**31), int(np.random.randint(2**31)), int(torch.randint(2**31, ())), int(own)


def draws(world: int, workers: int, **settings: Any) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for rank in range(world):
        loader = ElasticLoader(
            Noisy(24), global_batch=12, rank=rank, world_size=world, num_workers=workers, seed=5, **settings
        )
        for batch in loader:
            rows = list(zip(*(column.tolist() for column in batch.data), strict=True))
            found.update({row[0]: row[1:] for row in rows[: batch.count]})
        loader.close()
    return found


def test_augmentation_is_the_same_at_any_world_size_and_number_of_workers() -> None:
    alone = draws(1, 0)
    assert len(alone) == len(set(alone.values())) == 24
    assert alone == draws(3, 0) == draws(1, 2) == draws(2, 1, micro_batch=1)


def test_augmentation_differs_from_epoch_to_epoch() -> None:
    loader = ElasticLoader(Noisy(24), global_batch=24)
    first, second = (
        {int(i): int(d) for i, d in zip(b.data[0], b.data[1], strict=True)} for _ in range(2) for b in loader
    )
    assert first.keys() == second.keys()
    assert all(first[i] != second[i] for i in first)


def generators() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_leaves_the_trainers_generators_alone(workers: int) -> None:
    """Else a resumed run would draw other dropout masks than an undisturbed one."""
    before = generators()
    loader = ElasticLoader(Noisy(24), global_batch=12, num_workers=workers)
    for _ in range(2):
        list(loader)
    loader.close()
    assert generators() == before


ORDER = order_of(Shuffled(), 8, 0, 0).take(np.arange(8)).tolist()


class AtOnce(Numbers):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        return [(i, int(sample_rng(i).integers(2**31))) for i in indices]


def test_samples_are_read_at_once_where_the_dataset_can_and_seeding_is_off() -> None:
    whole = next(iter(ElasticLoader(AtOnce(8), global_batch=8, seed_samples=False))).data
    half = next(iter(ElasticLoader(AtOnce(8), global_batch=8, seed_samples=False, rank=0, world_size=2))).data
    assert whole[0].tolist() == ORDER
    assert whole[1].tolist()[:4] == half[1].tolist()
    one_by_one = next(iter(ElasticLoader(AtOnce(8), global_batch=8)))
    assert one_by_one.data.tolist() == ORDER


def test_workers_that_begin_in_the_middle_of_an_epoch_draw_what_others_would_have_drawn() -> None:
    """Without a seed for each sample: a worker's generators are those of the request."""

    def read(rank: int) -> list[list[Any]]:
        loader = ElasticLoader(Noisy(24), global_batch=8, seed_samples=False, num_workers=2, rank=rank, world_size=2)
        found = []
        for batch in loader:
            found.append([column.tolist() for column in batch.data])
            if again and len(found) == 1:
                loader.acknowledge()
                loader.reshard(rank, 2)  # as after a lost peer: other workers read the rest
        loader.close()
        return found

    again = False
    still = [read(rank) for rank in range(2)]
    again = True
    assert [read(rank) for rank in range(2)] == still
    drawn = [row for part in still for batch in part for row in zip(*batch[1:], strict=True)]
    assert len(set(drawn)) == 24


def test_sample_generator_outside_a_loader_is_refused() -> None:
    with pytest.raises(DataError, match="while an everstep loader reads a sample"):
        sample_rng(3)
