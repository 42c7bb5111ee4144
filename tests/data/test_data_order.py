"""Orders of an epoch: every shuffle is a bijection with a stable name, and block shuffle reads few blocks at a time."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.data.errors import DataError
from everstep.data.plan.order import Blocks, InOrder, Shuffled, label, order_of, shuffle_of

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def items(order: Any) -> list[int]:
    return order.take(np.arange(order.n)).tolist()


@settings(deadline=None)
@given(st.integers(1, 600), st.integers(1, 700), st.integers(1, 9), st.integers(0, 2**64 - 1), st.integers(0, 99))
def test_equal_blocks_of_any_size_give_each_item_once(n: int, size: int, window: int, seed: int, epoch: int) -> None:
    order = order_of(Blocks(size, window), n, seed, epoch)
    whole = items(order)
    assert sorted(whole) == list(range(n))
    assert [order.take([p]).item() for p in range(0, n, 7)] == whole[::7]


@settings(deadline=None)
@given(lengths, st.integers(1, 9), st.integers(0, 2**64 - 1))
def test_listed_blocks_of_any_lengths_give_each_item_once(shards: list[int], window: int, seed: int) -> None:
    order = order_of(Blocks(None, window), sum(shards), seed, 0, shards)
    assert sorted(items(order)) == list(range(sum(shards)))


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 50), st.integers(1, 9), st.integers(0, 99))
def test_equal_blocks_and_the_same_blocks_listed_give_one_order(n: int, size: int, window: int, seed: int) -> None:
    """Two ways to the same numbers: division, and a list of every block."""
    blocks = [min(size, n - start) for start in range(0, n, size)]
    assert items(order_of(Blocks(size, window), n, seed, 3)) == items(
        order_of(Blocks(None, window), n, seed, 3, blocks)
    )


@settings(deadline=None)
@given(lengths, st.integers(1, 5), st.integers(0, 99))
def test_each_window_holds_whole_blocks_and_no_others(shards: list[int], window: int, seed: int) -> None:
    n = sum(shards)
    block_of = np.repeat(np.arange(len(shards)), shards)
    visited = block_of[items(order_of(Blocks(None, window), n, seed, 0, shards))].tolist()
    seen: set[int] = set()
    while visited:
        group: set[int] = set()
        while visited and (visited[0] in group or len(group) < window):
            group.add(visited.pop(0))
        # A window may be over before all its blocks were met one after the other: then the next one's come in between.
        assert len(group) <= window
        seen |= group
    assert seen == set(range(len(shards)))


def test_block_shuffle_of_a_huge_dataset_needs_no_memory_for_it() -> None:
    n = 2**47 + 12_345
    order = order_of(Blocks(1024, 16), n, 7, 0)
    first = order.take(np.arange(16 * 1024))
    assert len(set((first // 1024).tolist())) == 16
    assert len(set(first.tolist())) == 16 * 1024
    assert 0 <= order.take([n - 1]) < n


def test_orders_are_these_for_ever() -> None:
    """Known answers of format version 1: seed, epoch and block layout included."""
    assert items(order_of(InOrder(), 5, 9, 9)) == [0, 1, 2, 3, 4]
    assert items(order_of(Shuffled(), 1000, 0, 0))[:6] == [734, 855, 843, 590, 123, 115]
    assert items(order_of(Shuffled(), 1000, 0, 1))[:6] == [569, 882, 925, 167, 940, 574]
    assert items(order_of(Shuffled(), 1000, 2**64 - 1, 0))[:6] == [11, 18, 312, 969, 739, 973]
    assert items(order_of(Blocks(16, 4), 1000, 0, 0))[:6] == [84, 228, 67, 237, 836, 227]
    assert items(order_of(Blocks(None, 2), 1000, 0, 0, [300, 300, 400]))[:6] == [581, 678, 751, 613, 593, 560]
    assert [label(s) for s in (InOrder(), Shuffled(), Blocks(16, 4), Blocks(None, 2))] == [
        "in-order",
        "permutation-1",
        "permutation-1/blocks-1/size=16/window=4",
        "permutation-1/blocks-1/size=shards/window=2",
    ]


def test_position_outside_an_order_is_refused() -> None:
    for shuffle in (InOrder(), Shuffled(), Blocks(3, 2)):
        for position in (-1, 10):
            with pytest.raises(IndexError, match="10 items"):
                order_of(shuffle, 10, 0, 0).take([position])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: shuffle_of("yes"), r"shuffle='yes': pass True, False or Blocks"),  # type: ignore[arg-type]
        (lambda: Blocks(0, 4), r"size=0.*at least 1"),
        (lambda: Blocks(8, 0), r"window=0.*at least 1"),
        (lambda: order_of(Shuffled(), 10, -1, 0), r"seed=-1: an integer from 0"),
        (lambda: order_of(Shuffled(), 10, 2**64, 0), r"seed=18446744073709551616: an integer from 0"),
        (lambda: order_of(Blocks(), 10, 0, 0), r"the dataset has none: pass a size"),
    ],
)
def test_setting_that_cannot_work_is_refused_with_the_fix(call: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        call()
