"""Ordinary DataLoaders that are taken over: the same data in the same steps at any world size, or a refusal by name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from everstep.data import DatasetChanged, ElasticLoader, PositionMismatch
from everstep.data.errors import DataError, LoaderUnusable
from everstep.data.plan.assignment import World
from everstep.data.takeover import TakenOver, name_of

N = 50


class Numbers(Dataset[int]):
    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def taken(loader: DataLoader[Any], ranks: int = 3, rank: int = 0, size: int | None = None) -> TakenOver:
    return TakenOver(loader, ranks=ranks, world=World(rank, ranks if size is None else size))


def epoch_of(loaders: list[TakenOver]) -> list[list[int]]:
    """Step by step the samples of the rest of an epoch, over all ranks."""
    streams = [iter(loader) for loader in loaders]
    steps = []
    for batches in zip(*streams, strict=True):
        steps.append([i for b in batches for i in b.data.tolist()[: b.count]])
        for loader in loaders:
            loader.acknowledge()
    return steps


def world_of(make: Any, ranks: int, size: int | None = None) -> list[TakenOver]:
    size = ranks if size is None else size
    return [taken(make(rank), ranks, rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_batch_size_is_that_of_one_process_and_the_global_batch_the_same_at_any_world_size(size: int) -> None:
    loaders = world_of(lambda _: DataLoader(Numbers(), batch_size=4), ranks=3, size=size)
    steps = epoch_of(loaders)
    assert [len(step) for step in steps] == [12, 12, 12, 12, 2]
    assert [i for step in steps for i in step] == list(range(N)), "not shuffled, as the DataLoader was not"


def test_each_sample_once_an_epoch_though_each_rank_has_shuffled_by_a_seed_of_its_own() -> None:
    def make(rank: int) -> DataLoader[int]:
        torch.manual_seed(rank)
        return DataLoader(Numbers(), batch_size=4, shuffle=True)

    loaders = world_of(make, 3)
    for loader in loaders:
        loader.agree(loaders[0].cursor.seed)
    first = [i for step in epoch_of(loaders) for i in step]
    second = [i for step in epoch_of(loaders) for i in step]
    assert sorted(first) == sorted(second) == list(range(N))
    assert first != second
    assert first != list(range(N))


def test_a_distributed_sampler_means_shuffle_and_seed_and_its_set_epoch_changes_nothing() -> None:
    def make(rank: int, seed: int = 5, epoch: int = 0) -> DataLoader[int]:
        sampler = DistributedSampler(Numbers(), num_replicas=3, rank=rank, seed=seed)
        sampler.set_epoch(epoch)
        return DataLoader(Numbers(), batch_size=4, sampler=sampler)

    plain = epoch_of(world_of(make, 3))
    moved = epoch_of(world_of(lambda rank: make(rank, epoch=7), 3))
    other = epoch_of(world_of(lambda rank: make(rank, seed=6), 3))
    assert plain == moved != other
    assert sorted(i for step in plain for i in step) == list(range(N)), "nothing is padded"
    unshuffled = DistributedSampler(Numbers(), num_replicas=1, rank=0, shuffle=False)
    assert epoch_of([taken(DataLoader(Numbers(), batch_size=10, sampler=unshuffled), 1)])[0] == list(range(10))


def test_drop_last_leaves_out_the_step_that_is_not_full() -> None:
    loaders = world_of(lambda _: DataLoader(Numbers(), batch_size=4, drop_last=True), 3)
    assert [len(step) for step in epoch_of(loaders)] == [12] * 4


def test_position_goes_on_in_another_world_with_the_batch_of_the_one_that_began() -> None:
    torch.manual_seed(1)
    first = taken(DataLoader(Numbers(), batch_size=4, shuffle=True), 3, 0, 1)
    stream = iter(first)
    seen = next(stream).data.tolist()
    first.acknowledge()
    torch.manual_seed(2)
    loaders = world_of(lambda _: DataLoader(Numbers(), batch_size=4, shuffle=True), ranks=2)
    for loader in loaders:
        loader.load_state_dict(first.state_dict())
        assert (loader.cursor.global_batch, loader.processes) == (12, 3)
        assert len(loader) == 5
    seen += [i for step in epoch_of(loaders) for i in step]
    assert sorted(seen) == list(range(N))
    with pytest.raises(PositionMismatch, match="global_batch=12"):
        taken(DataLoader(Numbers(), batch_size=6, shuffle=True)).load_state_dict(first.state_dict())


def test_workers_collate_and_worker_init_are_those_of_the_dataloader() -> None:
    def collate(samples: list[int]) -> tuple[list[int], int]:
        return samples, torch.utils.data.get_worker_info().seed and said[0]

    said = [0]

    def begin(_: int) -> None:
        said[0] = 41

    loader = DataLoader(
        Numbers(), batch_size=4, num_workers=1, collate_fn=collate, worker_init_fn=begin, persistent_workers=True,
        prefetch_factor=3, timeout=30,
    )  # fmt: skip
    found = taken(loader, 1)
    assert [b.data for b in found][:2] == [([0, 1, 2, 3], 41), ([4, 5, 6, 7], 41)]
    found.close()


# --- what a sampler draws


def test_weights_and_replacement_are_kept_and_cut_for_the_world() -> None:
    def make(_: int) -> DataLoader[int]:
        return DataLoader(Numbers(3), batch_size=2, sampler=WeightedRandomSampler([0.0, 1.0, 9.0], 300))

    loaders = world_of(make, 2)
    for loader in loaders:
        loader.agree(3)
    drawn = [i for step in epoch_of(loaders) for i in step]
    assert len(drawn) == 300
    assert drawn.count(0) == 0
    assert drawn.count(2) > 4 * drawn.count(1)
    assert loaders[0].drawn == loaders[1].drawn


class Ranks(Sampler[int]):
    """One that cuts by itself, as many projects have."""

    num_replicas, rank = 2, 1

    def __len__(self) -> int:
        return N // 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, N, 2))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class Devices(DataLoader[int]):
    def __iter__(self) -> Any:
        return map(torch.as_tensor, super().__iter__())


class Buckets(BatchSampler):
    pass


REFUSED: dict[str, tuple[Any, str]] = {
    "stream": (lambda: DataLoader(Stream()), r"Stream is an IterableDataset.*ShardedDataset"),
    "no batches": (lambda: DataLoader(Numbers(), batch_size=None), r"batch_size=None.*pass batch_size="),
    "own batches": (
        lambda: DataLoader(Numbers(), batch_sampler=Buckets(SequentialSampler(Numbers()), 4, False)),
        r"batch_sampler=Buckets\(…\) makes batches itself",
    ),
    "own iteration": (lambda: Devices(Numbers()), r"Devices iterates in a way of its own"),
    "own cuts": (lambda: DataLoader(Numbers(), sampler=Ranks()), r"Ranks takes the share of one of num_replicas=2"),
    "other world": (
        lambda: DataLoader(Numbers(), sampler=DistributedSampler(Numbers(), num_replicas=2, rank=1)),
        r"DistributedSampler\(num_replicas=2, rank=1\) is not cut for the processes of this job \(3\)",
    ),
    "other data": (
        lambda: DataLoader(Numbers(), sampler=DistributedSampler(Numbers(9), num_replicas=3, rank=1)),
        r"DistributedSampler is for 9 samples, and the dataset has 50",
    ),
    "no length": (lambda: DataLoader(Numbers(), sampler=iter(range(9))), "has no length"),  # type: ignore[arg-type]
    "too small": (lambda: DataLoader(Numbers(5), batch_size=4, drop_last=True), "less than one global_batch=12"),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_cannot_be_cut_again_is_refused_by_name_with_what_to_write(what: str) -> None:
    make, words = REFUSED[what]
    with pytest.raises(DataError, match=words):
        taken(make())


def test_a_plain_batch_sampler_is_as_good_as_batch_size() -> None:
    loader = DataLoader(Numbers(), batch_sampler=BatchSampler(SequentialSampler(Numbers()), 4, True))
    assert [len(step) for step in epoch_of(world_of(lambda _: loader, 3))] == [12] * 4


def test_the_name_says_what_is_read_and_in_which_order() -> None:
    data = TensorDataset(torch.zeros(4))
    assert name_of(DataLoader(data, shuffle=True)) == "the DataLoader of TensorDataset (RandomSampler)"
    own = DataLoader(data, batch_sampler=Buckets(RandomSampler(data), 2, False))
    assert name_of(own) == "the DataLoader of TensorDataset (Buckets)"


# --- what changes while it trains


def test_a_dataloader_that_is_changed_later_is_refused_in_the_next_epoch() -> None:
    loader = DataLoader(Numbers(), batch_size=4)
    one = taken(loader, 1)
    epoch_of([one])
    batches: Any = loader.batch_sampler
    batches.batch_size = 8
    with pytest.raises(LoaderUnusable, match=r"batch_sampler.batch_size was 4 when .* and is 8"):
        next(iter(one))


@pytest.mark.parametrize(
    "make", [lambda d: taken(DataLoader(d, batch_size=5), 1), lambda d: ElasticLoader(d, global_batch=5)]
)
def test_a_dataset_whose_length_changes_is_refused_in_the_next_epoch(make: Any) -> None:
    data = Numbers()
    one = make(data)
    epoch_of([one])
    data.n += 5
    with pytest.raises(DatasetChanged, match=r"Numbers had 50 samples .* has 55 in epoch 1"):
        next(iter(one))


# --- randomness that the dataset holds


class Noisy(Dataset[Any]):
    """Holds generators of its own, as augmentation libraries do."""

    class Transform:
        def __init__(self) -> None:
            self.random = random.Random(1)
            self.torch = torch.Generator().manual_seed(2)

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.transforms: list[Any] = [self.Transform(), {"legacy": np.random.RandomState(4)}]

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        one, two = self.transforms
        drawn = [
            self.rng.random(),
            one.random.random(),
            two["legacy"].rand(),
            float(torch.rand(1, generator=one.torch)),
        ]
        return index, torch.tensor(drawn, dtype=torch.float64)


@pytest.mark.parametrize("workers", [0, 2])
def test_generators_that_a_dataset_holds_draw_by_the_sample_whoever_reads_it(workers: int) -> None:
    def drawn(size: int, workers: int) -> dict[int, list[float]]:
        found = {}
        for rank in range(size):
            loader = ElasticLoader(Noisy(), global_batch=10, rank=rank, world_size=size, num_workers=workers)
            for batch in loader:
                found.update({int(i): row.tolist() for i, row in zip(*batch.data, strict=True)})
            loader.close()
        return found

    alone = drawn(1, 0)
    assert drawn(3, workers) == alone
    assert len({tuple(row) for row in alone.values()}) == N
