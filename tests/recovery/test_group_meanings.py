"""What ranks mean in a world of replicas, against torch's own reading of the same calls in each world."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

from everstep.recovery.group.meanings import (
    AcrossReplicas,
    AllRanks,
    GroupMeaning,
    WithinReplica,
    lacking,
    meaning,
    name_of,
    order_of,
    ranks_of,
    words,
)


@pytest.mark.parametrize(
    ("ranks", "most", "places", "found"),
    [
        ([0, 1], 4, 2, (WithinReplica((0, 1)), 0)),
        ([3, 2], 4, 2, (WithinReplica((0, 1)), 1)),
        ([6, 7], 8, 4, (WithinReplica((2, 3)), 1)),
        ([1, 3], 4, 2, (AcrossReplicas(1), 0)),
        ([0, 1, 2, 3], 4, 2, (AllRanks(), 0)),
        ([0, 1], 2, 2, (WithinReplica((0, 1)), 0)),  # a job of one replica: that each knows its place says more
        ([0, 1, 2, 3], 4, 1, (AllRanks(), 0)),
        ([2], 4, 1, (WithinReplica((0,)), 2)),  # a script that is told to divide its model over one
        ([0], 1, 1, (AllRanks(), 0)),
        ([0, 3], 4, 2, None),  # two places of two replicas
        ([1, 3], 6, 2, None),  # not all replicas
        ([0, 2, 4], 8, 2, None),
        ([0, 0], 4, 2, None),
        ([4, 5], 4, 2, None),
        ([], 4, 2, None),
        ([0, 1], 3, 2, None),
    ],
)
def test_ranks_mean_places_of_one_replica_or_all_replicas_of_a_place(
    ranks: list[int], most: int, places: int, found: object
) -> None:
    assert meaning(ranks, most, places) == found


@pytest.mark.parametrize(("replicas", "places"), [(1, 2), (2, 2), (3, 2), (2, 4), (4, 1)])
def test_what_ranks_mean_gives_back_the_ranks_that_were_named(replicas: int, places: int) -> None:
    most = replicas * places
    for size in range(1, most + 1):
        for ranks in combinations(range(most), size):
            found = meaning(ranks, most, places)
            if found is not None:
                what, _ = found
                assert ranks_of(what, ranks[0], most, places) == list(ranks)


def test_members_share_a_name_and_others_have_another() -> None:
    for what in (WithinReplica((0, 2)), AcrossReplicas(1), AllRanks()):
        by_name: dict[str, set[int]] = {}
        for rank in range(8):
            members = ranks_of(what, rank, 8, 4)
            if rank in members:
                by_name.setdefault(name_of(what, 0, rank, 4), set()).add(rank)
        assert all(set(ranks_of(what, min(ranks), 8, 4)) == ranks for ranks in by_name.values())
        assert name_of(what, 0, 1, 4) != name_of(what, 1, 1, 4)


def test_groups_are_formed_in_an_order_that_does_not_depend_on_the_replica() -> None:
    made: list[tuple[GroupMeaning, int]] = [
        (AcrossReplicas(0), 0),
        (WithinReplica((0, 1)), 1),
        (AllRanks(), 0),
        (WithinReplica((0, 1)), 0),
        (WithinReplica((0,)), 0),
    ]
    orders = [order_of(what, nth) for what, nth in made]
    assert len(set(orders)) == len(made)
    assert sorted(orders) == [orders[2], orders[4], orders[3], orders[1], orders[0]]


def test_group_that_was_made_for_some_replicas_only_is_named() -> None:
    whole = WithinReplica((0, 1))
    assert lacking(Counter({(whole, 0): 1, (whole, 1): 1, (whole, 2): 1, (AcrossReplicas(0), 0): 2}), 3, 2) is None
    assert lacking(Counter({(whole, 0): 1, (whole, 2): 1}), 3, 2) == [2, 3]
    assert lacking(Counter({(whole, 0): 2, (whole, 1): 2, (whole, 2): 1}), 3, 2) == [4, 5]


def test_as_many_groups_of_other_meanings_are_told_apart() -> None:
    inside, across = WithinReplica((0, 1)), AcrossReplicas(1)
    some: Counter[tuple[GroupMeaning, int]] = Counter({(inside, 0): 2, (inside, 1): 2, (across, 0): 1})
    assert words(some) == "place 1 of all replicas: 1; places 0, 1 of a replica: 2"
    assert words(Counter({(inside, 0): 1, (inside, 1): 1, (across, 0): 3})) != words(some)
    assert words(Counter(reversed(list(some.elements())))) == words(some)
    assert words(Counter({(AllRanks(), 0): 1})) == "all ranks: 1"
