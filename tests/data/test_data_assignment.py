"""Who reads what: shares of a step at any world size, their micro-batches and weights."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.data.errors import BatchUnusable, DatasetUnusable
from everstep.data.plan.assignment import Epoch, Share, Step, World, check_batch, part, shares, steps, weight

counts = st.integers(1, 300)
worlds = st.integers(1, 20)
micros = st.one_of(st.none(), st.integers(1, 50))


def all_shares(step: Step, world: int, micro_batch: int | None) -> list[tuple[Share, ...]]:
    return [shares(step, World(rank, world), micro_batch) for rank in range(world)]


@settings(deadline=None)
@given(st.integers(0, 1000), counts, worlds, micros)
def test_shares_of_any_world_are_the_whole_step_in_order(first: int, count: int, world: int, micro: int | None) -> None:
    step = Step(0, first, count)
    taken = [p for rank in all_shares(step, world, micro) for s in rank for p in range(s.first, s.first + s.count)]
    assert taken == list(range(first, first + count))


@settings(deadline=None)
@given(counts, worlds, micros)
def test_sizes_differ_by_at_most_one_and_no_micro_batch_is_too_large(count: int, world: int, micro: int | None) -> None:
    found = all_shares(Step(0, 0, count), world, micro)
    sizes = [sum(s.count for s in rank) for rank in found]
    assert max(sizes) - min(sizes) <= 1
    if micro is not None:
        assert max(s.rows for rank in found for s in rank) <= micro
    for rank in found:
        assert max(s.count for s in rank) - min(s.count for s in rank) <= 1


@settings(deadline=None)
@given(counts, worlds, micros)
def test_every_rank_has_the_same_number_of_micro_batches(count: int, world: int, micro: int | None) -> None:
    found = all_shares(Step(0, 0, count), world, micro)
    assert len({len(rank) for rank in found}) == 1
    assert all([s.micro for s in rank] == list(range(rank[0].micros)) for rank in found)


@settings(deadline=None)
@given(counts, worlds, micros)
def test_weights_make_the_average_over_ranks_the_mean_over_samples(count: int, world: int, micro: int | None) -> None:
    """With x as each sample's gradient: mean over ranks of sum over micro-batches of weight * mean == mean of all."""
    x = [math.sin(p) for p in range(count)]
    total = 0.0
    for rank in all_shares(Step(0, 0, count), world, micro):
        for s in rank:
            total += s.weight * sum(x[s.first : s.first + s.rows]) / s.rows / world
    assert total == pytest.approx(sum(x) / count, rel=1e-12, abs=1e-14)


def test_even_shares_have_weight_one_exactly() -> None:
    assert all(s.weight == 1.0 for rank in all_shares(Step(0, 0, 96), 8, None) for s in rank)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 200), st.booleans())
def test_steps_follow_one_another_to_the_end_of_the_epoch(n: int, batch: int, index: int, drop: bool) -> None:
    if drop and n < batch:
        return
    epoch = Epoch(n, batch, drop)
    found = list(steps(epoch, index))
    assert [s.first for s in found] == [index + i * batch for i in range(len(found))]
    assert all(s.count == batch for s in found[:-1])
    assert sum(s.count for s in found) == max(0, epoch.length - index)
    assert len(list(steps(epoch, 0))) == epoch.steps


def test_last_step_is_smaller_or_left_out() -> None:
    assert list(steps(Epoch(10, 4), 0)) == [Step(0, 0, 4), Step(1, 4, 4), Step(2, 8, 2)]
    assert list(steps(Epoch(10, 4, drop_last=True), 0)) == [Step(0, 0, 4), Step(1, 4, 4)]


def test_88_uneven_remainder_known_answer() -> None:
    """100 samples: by hand, for 8, 6 and 7 ranks."""
    sizes = {w: [s[0].count for s in all_shares(Step(0, 0, 100), w, None)] for w in (8, 6, 7)}
    assert sizes == {8: [13] * 4 + [12] * 4, 6: [17] * 4 + [16] * 2, 7: [15] * 2 + [14] * 5}
    assert [s[0].weight for s in all_shares(Step(0, 0, 100), 8, None)] == [1.04] * 4 + [0.96] * 4


def test_last_step_smaller_than_the_world_gives_fillers_of_weight_zero() -> None:
    found = [s[0] for s in all_shares(Step(9, 90, 2), 4, None)]
    assert [(s.first, s.count, s.rows, s.weight) for s in found] == [
        (90, 1, 1, 2.0),
        (91, 1, 1, 2.0),
        (90, 0, 1, 0.0),
        (90, 0, 1, 0.0),
    ]


def test_parts_know_their_place() -> None:
    assert [part(10, i, 4) for i in range(4)] == [(0, 3), (3, 3), (6, 2), (8, 2)]
    assert weight(3, 4, 10) == 1.2


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: check_batch(4, 8, None),
            BatchUnusable,
            r"global_batch=4 is smaller than the world of 8 .*Pass global_batch=8 or more, or use at most 4 ranks",
        ),
        (lambda: check_batch(8, 8, 0), BatchUnusable, "micro_batch=0: at least 1"),
        (lambda: World(8, 8), BatchUnusable, "rank 8 of a world of 8: ranks go from 0"),
        (lambda: World(-1, 8), BatchUnusable, "rank -1"),
        (lambda: Epoch(10, 0), BatchUnusable, "global_batch=0: at least 1"),
        (
            lambda: Epoch(3, 4, drop_last=True),
            DatasetUnusable,
            "3 samples, less than one global_batch=4, and drop_last",
        ),
    ],
)
def test_batch_and_world_that_do_not_fit_are_refused_with_the_fix(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        call()
