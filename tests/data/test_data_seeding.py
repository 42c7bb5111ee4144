"""Randomness belongs to the sample: the same augmentation at any world size, and the trainer's generators untouched."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from everstep.data import DataError, ElasticLoader, sample_rng
from everstep.data.plan.order import Shuffled, order_of


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


class Rows(TensorDataset):
    """One that draws, of a kind that does not."""

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), torch.randint(2**31, ()), random.randrange(2**31)


class Watched(torch.Tensor):
    """Whose own code sees its rows being read."""


def rows(dataset: Any, world: int) -> dict[int, tuple[int, ...]]:
    found = {}
    for rank in range(world):
        for batch in ElasticLoader(dataset, global_batch=12, rank=rank, world_size=world, seed=5):
            columns = zip(*(column.tolist() for column in batch.data), strict=True)
            found.update({row[0]: row[1:] for row in list(columns)[: batch.count]})
    return found


@pytest.mark.parametrize(
    "wrap", [lambda d: d, lambda d: Subset(d, range(24)), lambda d: ConcatDataset([d, Rows(d.tensors[0][:0])])]
)
def test_dataset_of_tensors_that_draws_draws_the_same_at_any_world_size(wrap: Any) -> None:
    dataset = wrap(Rows(torch.arange(24)))
    alone = rows(dataset, 1)
    assert len(set(alone.values())) == 24
    assert alone == rows(dataset, 3)


@pytest.mark.parametrize(
    ("dataset", "sets"),
    [
        (TensorDataset(torch.arange(4)), False),
        (Subset(TensorDataset(torch.arange(4)), [0, 1, 2, 3]), False),
        (ConcatDataset([TensorDataset(torch.arange(2)), TensorDataset(torch.arange(2, 4))]), False),
        (TensorDataset(torch.arange(4).as_subclass(Watched)), True),
        (ConcatDataset([TensorDataset(torch.arange(2)), Numbers(2)]), True),
    ],
)
def test_generators_are_set_for_each_sample_unless_nothing_can_draw(
    dataset: Any, sets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded: list[int] = []
    monkeypatch.setattr("everstep.data.fetching.seed_generators", seeded.append)
    assert sum(batch.count for batch in ElasticLoader(dataset, global_batch=4, collate_fn=list)) == 4
    assert len(seeded) == (4 if sets else 0)
