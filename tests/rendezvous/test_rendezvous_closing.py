"""Who is in the next round where more wait than fit, and which rank each of its members has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.contract.document import Sizes
from everstep.membership.commands import Evict, Form, Join, Stop, Waited
from everstep.membership.formation.selection import assign
from support.rendezvous.documents import after, agent, formed, names

# --- ranks


def ranks(old: str, new: str) -> str:
    previous = [agent(name, index) for index, name in enumerate(old)]
    index = {name: i for i, name in enumerate(old)}
    return "".join(m.agent for m in assign(previous, [agent(n, index.get(n.lower(), 50)) for n in new]))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("abc", "abc", "abc"),
        ("abc", "ac", "ac"),
        ("abc", "bc", "bc"),
        ("abcd", "acdx", "axcd"),  # the joiner takes the place that is free
        ("abcd", "dx", "xd"),  # d moves as little as it can
        ("abcd", "aBCd", "aBCd"),  # a new incarnation takes its worker's rank
        ("abc", "xyz", "xyz"),
        ("", "ba", "ab"),
        ("abc", "abcxy", "abcxy"),
    ],
)
def test_survivors_keep_their_ranks_and_joiners_fill_the_rest(old: str, new: str, expected: str) -> None:
    assert ranks(old, new) == expected


@given(st.integers(0, 12), st.sets(st.integers(0, 20), min_size=1, max_size=12))
def test_ranks_keep_order_and_as_many_ranks_as_order_allows(size: int, chosen: set[int]) -> None:
    previous = [agent(f"m{i:02}", i) for i in range(size)]
    result = assign(previous, [agent(f"m{i:02}", i) for i in chosen])
    assert sorted(m.index for m in result) == sorted(chosen)
    survivors = [m.index for m in result if m.index < size]
    assert survivors == sorted(survivors)
    for rank in range(min(size, len(result))):
        behind = sum(i > rank for i in survivors)
        if rank in survivors and rank < len(result) - behind:
            assert result[rank].index == rank


@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 4), st.data())
def test_ranks_of_groups_keep_as_many_places_as_there_are(
    group: int, before: int, now: int, data: st.DataObject
) -> None:
    size = now * group
    chosen = data.draw(st.sets(st.integers(0, 24), min_size=size, max_size=size))
    previous = [agent(f"m{i:02}", i) for i in range(before * group)]
    result = [m.index for m in assign(previous, [agent(f"m{i:02}", i) for i in chosen], group)]
    assert sorted(result) == sorted(chosen)
    if group > 1:
        assert all(result[i] == i for i in chosen if i < min(size, len(previous)))
    for place in range(group):
        held = {i for i in chosen if i < len(previous) and i % group == place}
        assert len(held & set(result[place::group])) == min(len(held), now) or group == 1


# --- groups that hold a replica together


PAIRS = Sizes(2, 6, (2, 4, 6))


@pytest.mark.parametrize(
    ("before", "asking", "expected"),
    [
        ("abcd", "acd", "cd"),  # b was lost: its partner waits, and the whole pair goes on
        ("abcd", "abd", "ab"),
        ("abcdef", "abcef", "abef"),
        ("abcdef", "acdef", "efcd"),  # c and d stay where they are, and all four have their places in a pair
        ("abcdef", "adf", "ad"),  # no pair is whole: an even place and an odd one
        ("abcdef", "acf", "af"),
        ("abcdef", "acdf", "afcd"),
        ("abcd", "acdx", "axcd"),
        ("abcd", "ac", "ac"),  # nobody has the other part
    ],
)
def test_of_more_than_fit_whole_groups_stay_and_then_those_with_different_parts(
    before: str, asking: str, expected: str
) -> None:
    document = formed(PAIRS, *before)
    lost = [name for name in before if name not in asking]
    document = after(document, *(Evict(asking[0], 1, name, "gone") for name in lost))
    document = after(document, *(Join(agent(name), PAIRS) for name in asking), Form(asking[0], 1, Waited.REJOIN))
    assert "".join(names(document)) == expected


def test_group_whose_member_is_asked_to_stop_gives_way_to_one_that_is_whole() -> None:
    document = after(formed(PAIRS, *"abcdef"), Stop("a"), Evict("a", 1, "f", "gone"))
    document = after(document, *(Join(agent(name), PAIRS) for name in "abcde"), Form("b", 1, Waited.REJOIN))
    assert "".join(names(document)) == "ebcd"


@pytest.mark.parametrize(("allowed", "group"), [((), 1), ((2, 4, 6), 2), ((4, 6), 2), ((3, 5), 1), ((4,), 4)])
def test_group_is_what_all_sizes_are_multiples_of(allowed: tuple[int, ...], group: int) -> None:
    assert Sizes(1, 6, allowed).group == group
