"""Samplers as a function of (seed, epoch): each draw is used once, in one order, at any worlds; or they are refused."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from everstep.data import ElasticLoader
from everstep.data.errors import DataError, LoaderUnusable, PositionMismatch
from everstep.data.randomness.draws import drawn_by

N = 40
MAKE: dict[str, Callable[[], Any]] = {
    "weighted": lambda: WeightedRandomSampler([1.0 + i for i in range(N)], 60),
    "replacement": lambda: RandomSampler(range(N), replacement=True, num_samples=33),
    "some": lambda: RandomSampler(range(N), num_samples=17),
    "subset": lambda: SubsetRandomSampler(list(range(5, 30))),
    "front": lambda: SequentialSampler(range(11)),
    "generator": lambda: SubsetRandomSampler(range(N), generator=torch.Generator().manual_seed(7)),
}


class Own(Sampler[int]):
    """Draws `k` samples by `how(epoch)`."""

    def __init__(self, how: Callable[[int], Any], length: Any = None) -> None:
        self.how, self.epoch, self.length = how, 0, length
        self.rng = np.random.default_rng(3)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.how(self.epoch)) if self.length is None else int(self.length)

    def __iter__(self) -> Iterator[int]:
        return iter(self.how(self.epoch))


def loader(make: Callable[[], Any], world: int = 1, rank: int = 0, seed: int = 0, **options: Any) -> ElasticLoader:
    return ElasticLoader(
        list(range(N)), global_batch=8, sampler=make(), seed=seed, rank=rank, world_size=world, **options
    )


def steps(loaders: list[ElasticLoader], count: int) -> list[int]:
    """The samples that so many steps of all ranks count, in rank order."""
    found: list[int] = []
    for _ in range(count):
        for one in loaders:
            batch = next(iter(one))
            found += batch.data.tolist()[: batch.count]
            one.acknowledge()
    return found


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(MAKE)),
    seed=st.integers(0, 2**64 - 1),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.booleans()), min_size=1, max_size=6),
)
def test_a_sampler_is_taken_in_one_order_over_any_worlds(
    kind: str, seed: int, worlds: list[tuple[int, int, bool]]
) -> None:
    drawn = drawn_by(MAKE[kind](), N)
    whole = [sample for epoch in range(20) for sample in drawn.draw(seed, epoch).tolist()]
    seen: list[int] = []
    loaders = [loader(MAKE[kind], seed=seed)]
    for size, count, fresh in worlds:
        state = json.loads(json.dumps(loaders[0].state_dict()))
        kept = [] if fresh else loaders[:size]
        for rank, one in enumerate(kept):
            one.reshard(rank, size)
        new = [loader(MAKE[kind], size, rank, seed=rank) for rank in range(len(kept), size)]
        for one in new:
            random.random()  # nobody's generators are where another's are
            one.load_state_dict(state)
        loaders = kept + new
        seen += steps(loaders, count)
    assert seen == whole[: len(seen)]


def test_epochs_and_seeds_differ_and_weights_are_kept() -> None:
    drawn = drawn_by(WeightedRandomSampler([0.0, 1.0, 9.0], 4000), 3)
    first, second, other = drawn.draw(0, 0), drawn.draw(0, 1), drawn.draw(1, 0)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    counts = Counter(first.tolist())
    assert counts[0] == 0
    assert counts[2] > 5 * counts[1]


def test_generators_of_the_process_and_of_the_sampler_are_left_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    drawn = drawn_by(RandomSampler(range(N), generator=generator), N)
    before = generator.get_state(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    drawn.draw(0, 3)
    after = generator.get_state(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert before[2:] == after[2:]


def test_a_sampler_with_a_generator_of_its_own_draws_by_the_epoch() -> None:
    own = Own(lambda _: ())
    own.how = lambda _: own.rng.permutation(N).tolist()
    own.length = N
    drawn = drawn_by(own, N)
    assert drawn.draw(0, 1).tolist() == drawn_by(own, N).draw(0, 1).tolist()
    assert drawn.draw(0, 1).tolist() != drawn.draw(0, 2).tolist()


def _counts() -> Any:
    calls: list[int] = []
    return Own(lambda _: (calls.append(1), [len(calls) % N, 0])[1], length=2)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (_counts(), "Own draws other samples when it is asked for the same epoch again"),
        (iter(range(3)), "range_iterator has no length"),
        (Own(lambda _: [1, 2], length=5), "Own has length 5 and draws 2 samples in epoch 0"),
        (Own(lambda _: range(10**9), length=5), "Own has length 5 and draws more samples in epoch 0"),
        (Own(lambda _: [1, N]), "Own draws samples 1 to 40 of a dataset of 40: 0 to 39 are expected"),
        (Own(lambda _: [-1, 0]), "Own draws samples -1 to 0"),
        (Own(lambda _: [[1, 2], [3]]), "one sample's index at a time is expected"),
        (Own(lambda _: []), "Own draws 0 samples"),
    ],
)
def test_a_sampler_whose_place_cannot_be_found_again_is_refused_by_name(sampler: Any, words: str) -> None:
    with pytest.raises(LoaderUnusable) as refused:
        drawn_by(sampler, N)
    assert words in str(refused.value)


def test_a_sampler_that_cuts_by_itself_is_refused() -> None:
    own = Own(lambda _: [1, 2])
    own.num_replicas = 4  # type: ignore[attr-defined]
    with pytest.raises(LoaderUnusable, match=r"one of num_replicas=4 processes by itself.*num_replicas=1, rank=0"):
        drawn_by(own, N)


def test_a_sampler_that_draws_otherwise_in_the_new_process_is_refused_when_the_position_is_loaded() -> None:
    one = loader(lambda: WeightedRandomSampler([1.0] * N, 30))
    steps([one], 1)
    saved = one.state_dict()
    other = loader(lambda: WeightedRandomSampler([1.0 + i for i in range(N)], 30))
    before = other.state_dict()
    with pytest.raises(PositionMismatch, match=r"sample 8 of epoch 0 as WeightedRandomSampler drew it.*other samples"):
        other.load_state_dict(saved)
    assert other.state_dict() == before


def test_a_position_of_one_sampler_is_none_of_another() -> None:
    one = loader(MAKE["subset"])
    steps([one], 1)
    with pytest.raises(DataError):
        loader(MAKE["weighted"]).load_state_dict(one.state_dict())


def test_shuffle_and_a_sampler_are_one_too_many() -> None:
    with pytest.raises(DataError, match="leave out shuffle="):
        loader(MAKE["some"], shuffle=False)
