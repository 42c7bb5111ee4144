"""Several datasets as one: proportions that hold at every position, and each source in epochs of its own."""

from collections import Counter
from fractions import Fraction
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from everstep.data import (
    Blocks,
    DataError,
    DatasetChanged,
    DatasetUnusable,
    ElasticLoader,
    Mixture,
    PositionMismatch,
    Shard,
    ShardedDataset,
)
from everstep.data.errors import LoaderUnusable
from everstep.data.plan.assignment import World
from everstep.data.plan.mixing import shares_of, table_of
from everstep.data.takeover import TakenOver


def named(name: str, n: int) -> list[str]:
    return [f"{name}{i}" for i in range(n)]


WRONG: Any = [1, 2, 3]  # samples without a weight


def mixture(**options: Any) -> Any:
    return Mixture({"a": (named("a", 50), 0.5), "b": (named("b", 7), 0.3), "c": (named("c", 40), 0.2)}, **options)


def samples(loader: ElasticLoader, epochs: int) -> list[list[str]]:
    """By step."""
    return [list(batch.data) for _ in range(epochs) for batch in loader]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_each_prefix_of_the_table_has_each_source_to_within_one(places: list[int]) -> None:
    table = table_of(tuple(places))
    assert len(table) == sum(places)
    for k, count in enumerate(places):
        share = np.arange(1, len(table) + 1) * count / sum(places)
        assert np.abs(np.cumsum(table == k) - share).max() < 1
    assert [int((table == k).sum()) for k in range(len(places))] == places


@pytest.mark.parametrize("shuffle", [True, False, Blocks(size=4, window=2)])
def test_proportions_hold_after_every_step_and_sources_have_epochs_of_their_own(shuffle: Any) -> None:
    steps = samples(ElasticLoader(mixture(shuffle=shuffle), global_batch=10, seed=3, collate_fn=list), 5)
    assert sum(map(len, steps)) == 5 * 97
    counts: Counter[str] = Counter()
    for step in steps:
        counts.update(s[0] for s in step)
        for name, share in {"a": 0.5, "b": 0.3, "c": 0.2}.items():
            assert abs(counts[name] - share * counts.total()) < 1
    drawn = list(chain(*steps))
    for name, n in {"a": 50, "b": 7, "c": 40}.items():
        own = [s for s in drawn if s[0] == name]
        epochs = [own[i : i + n] for i in range(0, len(own) - n + 1, n)]
        assert epochs
        assert all(sorted(e) == sorted(named(name, n)) for e in epochs)
        assert len({tuple(e) for e in epochs}) == (1 if shuffle is False else len(epochs))


@pytest.mark.parametrize("world", [2, 3])
def test_order_is_one_at_any_world_size_and_goes_on_at_any_step(world: int) -> None:
    alone = samples(ElasticLoader(mixture(), global_batch=12, seed=1, collate_fn=list), 3)
    loaders = [
        ElasticLoader(mixture(), global_batch=12, seed=1, collate_fn=list, rank=r, world_size=world)
        for r in range(world)
    ]
    found = []
    for _ in range(3):
        for batches in zip(*loaders, strict=True):
            found.append([s for batch in batches for s in batch.data[: batch.count]])
    assert found == alone
    first = ElasticLoader(mixture(), global_batch=12, seed=1, collate_fn=list)
    for batch in islice(first, 5):
        assert batch.count == 12
        first.acknowledge()
    after = ElasticLoader(mixture(), global_batch=12, collate_fn=list)
    after.load_state_dict(first.state_dict())
    assert samples(after, 3) == alone[5:]


def test_shards_are_the_blocks_of_the_sources_that_have_them() -> None:
    shards = ShardedDataset([Shard(f"s{i}-", 5) for i in range(6)], lambda name: named(name, 5))
    both = Mixture({"shards": (shards, 1), "list": (named("l", 30), 1)}, shuffle=Blocks(window=2))
    drawn = list(chain(*samples(ElasticLoader(both, global_batch=6, collate_fn=list), 1)))
    own = [s for s in drawn if s[0] == "s"]
    assert sorted(drawn) == sorted([*named("l", 30), *chain(*(named(f"s{i}-", 5) for i in range(6)))])
    for at in range(0, 30, 10):
        assert len({s.split("-")[0] for s in own[at : at + 10]}) == 2, "a window of two shards"


def test_index_tells_its_source() -> None:
    data = mixture()
    batch = next(iter(ElasticLoader(data, global_batch=20, collate_fn=list)))
    assert [data.source_of(i) for i in batch.indices.tolist()] == [s[0] for s in batch.data]


def test_dataloader_of_a_mixture_is_taken_over_in_its_order() -> None:
    taken = TakenOver(DataLoader(mixture(), batch_size=12, collate_fn=list), ranks=1, world=World(0, 1))
    taken.agree(4)
    assert samples(taken, 2) == samples(ElasticLoader(mixture(), global_batch=12, seed=4, collate_fn=list), 2)


def test_weights_are_whole_numbers_in_their_smallest_form() -> None:
    assert shares_of({"a": 0.7, "b": 0.2, "c": 0.1}) == {"a": 7, "b": 2, "c": 1}
    assert shares_of({"a": 4, "b": 6}) == {"a": 2, "b": 3}
    assert shares_of({"a": Fraction(1, 3), "b": Fraction(2, 3)}) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Mixture({}), DataError, "names with datasets and weights are expected"),
        (lambda: Mixture({"a": WRONG}), DataError, "names with datasets and weights are expected"),
        (lambda: Mixture([[1], [2]]), DataError, r'weights are expected: {"web": \(web, 0\.7\)'),  # type: ignore[arg-type]
        (
            lambda: Mixture({"a": ([1], 1), "b": ([], 1)}),
            DatasetUnusable,
            "source 'b' of the mixture: dataset list has 0",
        ),
        (lambda: Mixture({"a": ([1], 0)}), DataError, "weight 0 of 'a': a number above 0"),
        (lambda: Mixture({"a": ([1], float("nan"))}), DataError, "weight nan of 'a'"),
        (lambda: Mixture({"a": ([1], 0.123457), "b": ([1], 1)}), DataError, "repeat after 1123457 samples.*round them"),
        (lambda: Mixture({"a": ([1], 1)}, length=0), DataError, "length=0"),
        (
            lambda: ElasticLoader(mixture(), global_batch=2, shuffle=True),
            DataError,
            "shuffle= with a Mixture.*leave it",
        ),
        (lambda: ElasticLoader(mixture(), global_batch=2, sampler=[1]), DataError, "sampler= with a Mixture"),
        (
            lambda: TakenOver(DataLoader(mixture(), shuffle=True), ranks=1, world=World(0, 1)),
            LoaderUnusable,
            "RandomSampler: a Mixture has an order of its own: leave out shuffle=",
        ),
        (
            lambda: TakenOver(
                DataLoader(mixture(), sampler=DistributedSampler(mixture(), 1, 0)), ranks=1, world=World(0, 1)
            ),
            LoaderUnusable,
            "DistributedSampler: a Mixture has an order of its own",
        ),
    ],
)
def test_what_is_no_mixture_is_refused_with_the_fix(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_position_of_another_mixture_is_refused() -> None:
    loader = ElasticLoader(mixture(), global_batch=10, collate_fn=list)
    next(iter(loader))
    loader.acknowledge()
    state = loader.state_dict()
    other = Mixture({"a": (named("a", 50), 0.6), "b": (named("b", 7), 0.3), "c": (named("c", 40), 0.1)})
    with pytest.raises(PositionMismatch, match="mixture-1/5:3:2"):
        ElasticLoader(other, global_batch=10).load_state_dict(state)
    renamed = Mixture({"a": (named("a", 50), 0.5), "b": (named("b", 7), 0.3), "d": (named("c", 40), 0.2)})
    with pytest.raises(DatasetChanged):
        ElasticLoader(renamed, global_batch=10).load_state_dict(state)
