"""The sampler for those who keep their own loop: like DistributedSampler, with a position that survives a resize."""

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from everstep.data import DataError, DatasetChanged, ElasticLoader, ElasticSampler
from everstep.data.plan.order import Shuffled, order_of


def world(size: int, n: int, state: Any = None, **settings: Any) -> list[ElasticSampler]:
    samplers = [ElasticSampler(range(n), size, r, **settings) for r in range(size)]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(json.loads(json.dumps(state)))
    return samplers


def expected(n: int, epoch: int = 0, seed: int = 0) -> list[int]:
    return order_of(Shuffled(), n, seed, epoch).take(np.arange(n)).tolist()


def in_turns(samplers: list[ElasticSampler]) -> list[int]:
    return [index for turn in zip(*samplers, strict=True) for index in turn]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("n", "size"), [(24, 4), (25, 4), (27, 4), (3, 4), (10, 1)])
def test_undisturbed_epoch_has_the_shape_of_torchs_distributed_sampler(n: int, size: int, drop_last: bool) -> None:
    for rank in range(size):
        ours = ElasticSampler(range(n), size, rank, shuffle=False, drop_last=drop_last)
        torchs = DistributedSampler(range(n), size, rank, shuffle=False, drop_last=drop_last)  # type: ignore[arg-type]
        assert list(ours) == list(torchs)
        assert len(ours) == len(list(ours))


def test_ranks_take_turns_in_the_one_order() -> None:
    assert in_turns(world(4, 24)) == expected(24)
    assert in_turns(world(3, 24)) == expected(24)


def test_set_epoch_changes_the_order_and_the_present_epoch_goes_on() -> None:
    sampler = world(1, 20)[0]
    sampler.consumed(5)
    sampler.set_epoch(0)
    assert list(sampler) == expected(20)[5:]
    assert len(sampler) == 15
    sampler.set_epoch(1)
    assert list(sampler) == expected(20, epoch=1)
    assert len(sampler) == 20


def test_85_random_resizes_use_each_sample_once() -> None:
    """Positions move by what was consumed, while a DataLoader with workers has prefetched more."""
    rng = random.Random(5)
    n, state = 480, None
    used: list[int] = []
    numbers: Any = list(range(n))
    while len(used) < n:
        size = rng.choice([s for s in (1, 2, 3, 4) if (n - len(used)) % s == 0])
        samplers = world(size, n, state)
        loaders = [DataLoader(numbers, batch_size=4, sampler=s, num_workers=rng.choice([0, 1])) for s in samplers]
        loops = [iter(loader) for loader in loaders]
        for _ in range(rng.randint(1, 15)):
            taken = [next(loop, None) for loop in loops]
            if taken[0] is None:
                break
            step = [int(i) for turn in zip(*(t.tolist() for t in taken if t is not None), strict=True) for i in turn]
            used += step
            for sampler in samplers:
                sampler.consumed(len(step))
        state = samplers[0].state_dict()
        del loops, loaders
    assert used == expected(n)


def test_86_prefetched_samples_are_not_consumed() -> None:
    sampler = world(1, 100)[0]
    loop = iter(sampler)
    first = list(itertools.islice(loop, 40))  # a DataLoader's prefetch asks for more than is trained on
    sampler.consumed(10)
    resumed = world(1, 100, sampler.state_dict())[0]
    assert list(resumed) == expected(100)[10:]
    assert first + list(loop) == expected(100)  # the iteration in progress is not disturbed
    assert len(sampler) == 100


def test_last_batch_may_be_reported_as_a_full_one() -> None:
    sampler = world(1, 10)[0]
    for _ in range(3):
        sampler.consumed(4)
    assert sampler.state_dict()["index"] == 10
    assert list(sampler) == []
    sampler.set_epoch(1)
    assert len(list(sampler)) == 10


def test_negative_report_is_refused() -> None:
    with pytest.raises(DataError, match=r"consumed\(-1\)"):
        world(1, 10)[0].consumed(-1)


def test_reshard_takes_effect_with_the_next_iteration() -> None:
    sampler = world(2, 12)[0]
    sampler.consumed(4)
    sampler.reshard(2, 4)
    assert list(sampler) == expected(12)[4:][2::4]
    assert len(sampler) == 2


def test_87_changed_dataset_is_refused() -> None:
    state = world(1, 10)[0].state_dict()
    with pytest.raises(DatasetChanged, match="its length was 10 and is 11"):
        world(1, 11, state)


def test_position_moves_between_sampler_and_loader() -> None:
    sampler = ElasticSampler(list(range(20)), 1, 0, seed=3)
    sampler.consumed(12)
    loader = ElasticLoader(list(range(20)), global_batch=4)
    loader.load_state_dict(sampler.state_dict())
    assert list(itertools.chain(*(b.data.tolist() for b in loader))) == expected(20, seed=3)[12:]
