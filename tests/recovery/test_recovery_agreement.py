"""Who gives its state to whom, for any members."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.recovery.transfer.agreement import Agreement, MemberState, NoState, agree
from everstep.recovery.validity import Validity

states = st.lists(
    st.builds(MemberState, st.integers(0, 3), st.sampled_from(list(Validity)), *[st.integers(0, 1)] * 3),
    min_size=1,
    max_size=6,
)


def test_members_that_agree_send_nothing() -> None:
    assert agree([MemberState(7, Validity.WHOLE, 5)] * 3) == Agreement(7, 0, ())


def test_new_process_gets_the_state_of_those_that_have_one_even_at_step_0() -> None:
    told = [MemberState(0, Validity.NONE, 0), MemberState(0, Validity.WHOLE, 9), MemberState(0, Validity.WHOLE, 9)]
    assert agree(told) == Agreement(0, 1, (0,))


def test_member_that_completed_one_step_more_gives_it_to_the_others() -> None:
    told = [MemberState(7, Validity.WHOLE, 1), MemberState(8, Validity.WHOLE, 2), MemberState(7, Validity.WHOLE, 1)]
    assert agree(told) == Agreement(8, 1, (0, 2))


def test_member_whose_state_is_torn_gives_it_to_nobody() -> None:
    told = [MemberState(9, Validity.TORN, 2), MemberState(8, Validity.WHOLE, 2)]
    assert agree(told) == Agreement(8, 1, (0,))


def test_member_with_other_parameters_at_the_same_step_is_named_and_takes_that_of_the_most() -> None:
    told = [MemberState(8, Validity.WHOLE, 2), MemberState(8, Validity.WHOLE, 3), MemberState(8, Validity.WHOLE, 2)]
    assert agree(told) == Agreement(8, 0, (1,), diverged=(1,))


def test_of_members_at_the_same_step_the_state_that_most_hold_wins_over_the_lowest_rank() -> None:
    told = [MemberState(8, Validity.WHOLE, 3), MemberState(8, Validity.WHOLE, 2), MemberState(8, Validity.WHOLE, 2)]
    assert agree(told) == Agreement(8, 1, (0,), diverged=(0,))


def test_of_two_members_whose_parameters_differ_neither_is_right() -> None:
    one, other = (MemberState(8, Validity.WHOLE, d, d) for d in (2, 3))
    with pytest.raises(NoState, match=r"ranks \[0, 3\] hold other parameters than ranks \[1, 2\] after the same"):
        agree([one, other, other, one])
    assert agree([one, other, other]) == Agreement(8, 1, (0,), diverged=(0,))


def test_same_step_that_was_made_in_a_later_round_wins_over_what_most_hold() -> None:
    """A member that was cut off has made the step with others, who have repeated it without that member."""
    cut_off = MemberState(8, Validity.WHOLE, 2, 2, made=5)
    assert agree([cut_off, cut_off, MemberState(8, Validity.WHOLE, 3, 3, made=6)]) == Agreement(8, 2, (0, 1))


def test_parameters_of_the_most_win_where_all_values_differ() -> None:
    told = [MemberState(8, Validity.WHOLE, d, p) for d, p in ((1, 5), (2, 6), (3, 6))]
    assert agree(told) == Agreement(8, 1, (0, 2), diverged=(0, 2))


def test_new_processes_alone_have_no_holder() -> None:
    assert agree([MemberState(0, Validity.NONE, 0)] * 2) == Agreement(0, None, ())


def test_torn_states_alone_are_no_state_and_beside_a_whole_one_they_are_replaced() -> None:
    torn = MemberState(8, Validity.TORN, 1)
    with pytest.raises(NoState, match="no whole state"):
        agree([torn, MemberState(0, Validity.NONE, 0)])
    assert agree([torn, MemberState(7, Validity.WHOLE, 1)]) == Agreement(7, 1, (0,))


@given(states)
def test_afterwards_all_hold_the_newest_whole_state_of_any(told: list[MemberState]) -> None:
    try:
        found = agree(told)
    except NoState:
        usable = [s for s in told if s.validity > Validity.NONE]
        newest = Counter(s.parameters for s in usable if s.version == max(s.version for s in usable))
        assert newest[0] == newest[1]  # with no usable state, both are 0
        return
    if found.holder is None:
        assert all(s.validity is Validity.NONE for s in told)
        return
    after = [told[found.holder] if rank in found.receivers else s for rank, s in enumerate(told)]
    assert len(set(after)) == 1
    assert found.holder not in found.receivers
    assert after[0].validity > Validity.NONE
    assert found.step == after[0].step == max(s.step for s in told if s.validity > Validity.NONE)
    assert set(found.diverged) <= set(found.receivers)


@given(states)
def test_state_that_wins_does_not_depend_on_the_order_of_ranks(told: list[MemberState]) -> None:
    try:
        found = agree(told)
    except NoState:
        return
    if found.holder is None:
        return
    best = told[found.holder]
    turned = agree(told[::-1])
    assert turned.holder is not None
    assert (told[::-1][turned.holder].step, told[::-1][turned.holder].validity) == (best.step, best.validity)
