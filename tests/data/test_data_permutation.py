"""The keyed permutation: a bijection with an inverse, stable for ever, and random enough to train by."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.data.errors import DataError
from everstep.data.plan.permutation import MAX_N, TABLE_N, Permutation

sizes = st.one_of(st.integers(1, 3000), st.integers(0, 15).map(lambda k: 2**k + 1), st.just(TABLE_N + 1))
keys = st.binary(max_size=24)


def key(number: int) -> bytes:
    return number.to_bytes(8, "little")


@settings(deadline=None)
@given(sizes, keys)
def test_any_size_and_key_gives_each_item_once(n: int, k: bytes) -> None:
    assert sorted(Permutation(n, k).take(np.arange(n)).tolist()) == list(range(n))


@settings(deadline=None)
@given(st.integers(1, MAX_N), keys, st.data())
def test_any_position_comes_back_through_the_inverse(n: int, k: bytes, data: st.DataObject) -> None:
    order = Permutation(n, k)
    position = data.draw(st.integers(0, n - 1))
    (item,) = order.take([position])
    assert 0 <= item < n
    assert order.position_of(int(item)) == position
    assert order.take([order.position_of(position)]) == [position]


def test_many_positions_at_once_equal_few_at_a_time() -> None:
    n = 40_000  # several chunks
    order = Permutation(n, b"chunks")
    whole = order.take(np.arange(n))
    assert np.array_equal(whole.reshape(200, 200), order.take(np.arange(n).reshape(200, 200)))
    assert np.array_equal(whole[::-1], order.take(np.arange(n)[::-1]))
    assert whole[12_345] == order.take([12_345])


@pytest.mark.parametrize(
    ("n", "k", "items"),
    [
        (1, b"", [0]),
        (10, b"everstep", [4, 9, 0, 2, 5, 3, 1, 8, 6, 7]),
        (256, b"everstep", [239, 164, 207, 219, 84]),
        (257, b"everstep", [58, 105, 66, 36, 243]),
        (60_000, b"everstep", [7402, 11497, 46258, 46211, 23108]),
        (2**32, b"everstep", [2203368296, 2171791368, 2862594023, 549131718, 248784267]),
        (MAX_N, b"everstep", [50294267195488, 82099405583659, 152927007001074, 142605314013701, 230417665365338]),
        (MAX_N - 1, b"", [106685487475190, 25072287927533, 232575967321243, 164039999420091, 120984303524020]),
    ],
)
def test_version_1_gives_these_items_for_ever(n: int, k: bytes, items: list[int]) -> None:
    """A position in a checkpoint means nothing if the order changes: a new order is a new VERSION."""
    assert Permutation(n, k).take(np.arange(len(items))).tolist() == items


@pytest.mark.parametrize("n", [0, -1, MAX_N + 1])
def test_size_out_of_range_is_refused(n: int) -> None:
    with pytest.raises(DataError, match=f"{n} items: between 1 and {MAX_N}"):
        Permutation(n, b"")


@pytest.mark.parametrize("position", [-1, 100, 300])
@pytest.mark.parametrize("n", [100, 300])
def test_position_outside_is_refused(n: int, position: int) -> None:
    order = Permutation(n, b"")
    if 0 <= position < n:
        return
    for call in (order.position_of, lambda p: order.take([0, p])):
        with pytest.raises(IndexError):
            call(position)


# How random. All keys are fixed, so these are known answers too; each bound is five standard deviations.


def deviations(chi_square: float, degrees: int) -> float:
    return (chi_square - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_few_items_all_orders_are_equally_likely(n: int) -> None:
    draws = 60 * math.factorial(n)
    seen = Counter(tuple(Permutation(n, key(i)).take(np.arange(n)).tolist()) for i in range(draws))
    expected = draws / math.factorial(n)
    chi = sum((seen[p] - expected) ** 2 / expected for p in itertools.permutations(range(n)))
    assert abs(deviations(chi, math.factorial(n) - 1)) < 5


@pytest.mark.parametrize("n", [100, 257, 512])
def test_any_item_is_equally_likely_at_any_position(n: int) -> None:
    draws = 1500
    counts = np.zeros((n, n))
    for i in range(draws):
        counts[np.arange(n), Permutation(n, key(i)).take(np.arange(n))] += 1
    expected = draws / n
    assert abs(deviations(float(((counts - expected) ** 2 / expected).sum()), (n - 1) ** 2)) < 5


@pytest.mark.long_but("512")
@pytest.mark.parametrize("n", [100, 257, 512, 600])
def test_inversions_fixed_points_and_neighbours_are_those_of_a_random_order(n: int) -> None:
    draws = 1000
    inversions, fixed, following = [], 0, 0
    for i in range(draws):
        order = Permutation(n, key(i)).take(np.arange(n))
        inversions.append(int(np.triu(order[:, None] > order[None, :], 1).sum()))
        fixed += int((order == np.arange(n)).sum())
        following += int((np.diff(order) == 1).sum())
    variance = n * (n - 1) * (2 * n + 5) / 72
    mean = (np.mean(inversions) - n * (n - 1) / 4) / math.sqrt(variance / draws)
    spread = (np.var(inversions) / variance - 1) / math.sqrt(2 / draws)
    assert abs(mean) < 5
    assert abs(spread) < 5
    assert abs(fixed - draws) / math.sqrt(draws) < 5  # one on average, Poisson
    assert abs(following - draws * (n - 1) / n) / math.sqrt(draws) < 5


def test_neighbouring_keys_and_sizes_give_unrelated_orders() -> None:
    n = 50_000
    orders = [Permutation(n, key(i)).take(np.arange(n)) for i in range(4)]
    orders.append(Permutation(n + 1, key(0)).take(np.arange(n)))
    for a, b in itertools.combinations(orders, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(n) < 5
    for a in orders:
        assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) * math.sqrt(n) < 5
