"""A dataset of shards: samples by index from what can only be read forward, in bounded memory."""

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.data import Blocks, DataError, DatasetUnusable, ElasticLoader, Shard, ShardedDataset, sample_rng
from everstep.data.fingerprints import fingerprint


class Shelf:
    """Shards by name; counts what is opened, and what is open at a time."""

    def __init__(self, lengths: dict[str, int]) -> None:
        self.lengths = lengths
        self.opened: list[str] = []
        self.now: set[str] = set()
        self.most = 0

    def sequence(self, name: str) -> list[str]:
        self.opened.append(name)
        return [f"{name}/{i}" for i in range(self.lengths[name])]

    def stream(self, name: str) -> "Stream":
        self.opened.append(name)
        self.now.add(name)
        self.most = max(self.most, len(self.now))
        return Stream(self, name)

    def shards(self) -> list[Shard]:
        return [Shard(name, length) for name, length in self.lengths.items()]

    def all(self) -> list[str]:
        return [f"{name}/{i}" for name, length in self.lengths.items() for i in range(length)]


class Stream:
    def __init__(self, shelf: Shelf, name: str) -> None:
        self.shelf, self.name = shelf, name

    def __iter__(self) -> Iterator[str]:
        return (f"{self.name}/{i}" for i in range(self.shelf.lengths[self.name]))

    def close(self) -> None:
        self.shelf.now.remove(self.name)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4), st.booleans(), st.randoms())
def test_any_index_gives_its_sample_whatever_is_open(lengths: list[int], limit: int, stream: bool, rng: Any) -> None:
    shelf = Shelf({f"s{i}": length for i, length in enumerate(lengths)})
    data = ShardedDataset(shelf.shards(), shelf.stream if stream else shelf.sequence, open_limit=limit)
    wanted = shelf.all()
    assert len(data) == len(wanted)
    for index in rng.choices(range(len(wanted)), k=30):
        assert data[index] == wanted[index]
    assert shelf.most <= limit
    data.close()
    assert shelf.now == set()


def test_block_shuffle_over_forward_shards_opens_each_once_an_epoch_and_few_at_a_time() -> None:
    shelf = Shelf({f"s{i}": 20 + i for i in range(12)})
    data = ShardedDataset(shelf.shards(), shelf.stream, open_limit=8)
    loader = ElasticLoader(data, global_batch=7, shuffle=Blocks(window=4))
    seen = list(itertools.chain(*(batch.data for batch in loader)))
    assert sorted(seen) == sorted(shelf.all())
    assert seen != shelf.all()
    assert sorted(shelf.opened) == sorted(shelf.lengths)
    assert shelf.most <= 8
    data.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_85_order_over_shards_is_one_at_any_world_size(workers: int) -> None:
    shelf = Shelf({f"s{i}": 10 + i for i in range(6)})
    orders = []
    for world in (1, 3):
        loaders = [
            ElasticLoader(
                ShardedDataset(shelf.shards(), shelf.stream),
                global_batch=9, rank=r, world_size=world, shuffle=Blocks(window=2), num_workers=workers,
            )
            for r in range(world)
        ]  # fmt: skip
        orders.append([s for step in zip(*loaders, strict=True) for b in step for s in b.data[: b.count]])
        for loader in loaders:
            loader.close()
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(shelf.all())


def test_transform_runs_under_the_samples_own_seed() -> None:
    def draw(sample: str) -> tuple[str, int]:
        return sample, int(sample_rng().integers(2**31))

    shelf = Shelf({"a": 5, "b": 6})
    found = []
    for world in (1, 2):
        got: dict[str, int] = {}
        for rank in range(world):
            data = ShardedDataset(shelf.shards(), shelf.stream, transform=draw)
            for batch in ElasticLoader(data, global_batch=4, rank=rank, world_size=world, collate_fn=list):
                got.update(batch.data[: batch.count])
        found.append(got)
    assert found[0] == found[1]
    assert len(set(found[0].values())) == 11


def test_fingerprint_tells_names_lengths_and_their_order() -> None:
    shelf = Shelf({"a": 3, "b": 4})
    first = fingerprint(ShardedDataset(shelf.shards(), shelf.stream))
    assert first == fingerprint(ShardedDataset(shelf.shards(), shelf.sequence))
    for shards in ([Shard("b", 4), Shard("a", 3)], [Shard("a", 4), Shard("b", 3)], [Shard("a", 3), Shard("c", 4)]):
        assert fingerprint(ShardedDataset(shards, shelf.stream)) != first


def test_sending_it_to_a_worker_leaves_open_shards_behind() -> None:
    data = ShardedDataset([Shard("a", 3)], _letters)
    assert data[1] == "a1"
    copy = pickle.loads(pickle.dumps(data))
    assert [copy[i] for i in range(3)] == ["a0", "a1", "a2"]


def _letters(name: str) -> Iterator[str]:
    return (f"{name}{i}" for i in range(3))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ShardedDataset([], _letters), DatasetUnusable, "without shards"),
        (lambda: Shard("a", 0), DatasetUnusable, "shard 'a' has length 0"),
        (
            lambda: ShardedDataset([Shard("a", 1), Shard("b", 1), Shard("a", 1)], _letters),
            DatasetUnusable,
            "shard 'a' 2 times.*Name each shard once.*Mixture",
        ),
        (lambda: ShardedDataset([Shard("a", 1)], _letters, open_limit=0), DataError, "open_limit=0"),
        (lambda: ShardedDataset([Shard("a", 4)], _letters)[3], DatasetUnusable, "declared with 4 .* holds 3: declare"),
        (lambda: ShardedDataset([Shard("a", 2)], _letters)[1], DatasetUnusable, "declared with 2 .* holds more"),
        (lambda: ShardedDataset([Shard("a", 2)], list)[0], DatasetUnusable, "declared with 2 .* holds 1"),
        (lambda: ShardedDataset([Shard("a", 3)], _letters)[3], IndexError, "sample 3 of a dataset of 3"),
        (
            lambda: ElasticLoader(
                ShardedDataset([Shard("a", 3)], _letters, open_limit=2), global_batch=1, shuffle=Blocks(window=3)
            ),
            DataError,
            r"Blocks\(window=3\) mixes more shards than open_limit=2.*pass open_limit=3 or more",
        ),
    ],
)
def test_shards_that_do_not_fit_are_refused_with_the_fix(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        call()
