"""The membership machine, situation by situation; `test_rendezvous_world.py` has what must hold in all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.contract.document import (
    FINISHED,
    LEFT,
    MAX_BYTES,
    MAX_MEMBERS,
    Document,
    JoinRequest,
    Loss,
    Member,
    Report,
    Seat,
    Setback,
    Sizes,
    decode,
    decode_join_request,
    encode,
)
from everstep.membership.commands import (
    Break,
    Charge,
    CloseJob,
    Done,
    Drain,
    Evict,
    Form,
    Join,
    KeepProcesses,
    Leave,
    Reach,
    SetBoundary,
    Stop,
    Waited,
    Withdraw,
)
from everstep.membership.draining import Coming, Staying, staying
from everstep.membership.errors import DocumentInvalid
from everstep.membership.formation.selection import EXACT, expected_rank, growth, largest_set
from everstep.membership.machine import MAX_FLAPS, Rejected, apply
from everstep.membership.world_state import Broken, Finishing, Growing, Left, Stopping, Whole, world_state
from everstep_operator.rounds.rules import with_pinned_sizes
from support.rendezvous.documents import TWO_OR_THREE, after, agent, formed, joined, names, refused

# --- forming


def test_new_agent_expects_the_rank_of_its_worker_and_the_size_that_the_next_round_will_have() -> None:
    document = formed(TWO_OR_THREE, "a", "b", "c")
    assert expected_rank(document, 1) == (1, 3)
    assert expected_rank(document, 3) == (2, 3), "a spare takes anybody's place"
    assert expected_rank(document, -1) == (2, 3)
    shrunk = after(document, Leave("c"))
    assert expected_rank(shrunk, 2) == (2, 3), "it takes the place that is free"
    assert expected_rank(Document(TWO_OR_THREE), 0) is None


def test_first_round_with_all_there_is_formed_at_once() -> None:
    document = after(joined(TWO_OR_THREE, "a", "b", "c"), Form("b", 0, Waited.NOTHING))
    assert (document.round, names(document), document.joining) == (1, ["a", "b", "c"], ())


def test_who_is_not_here_may_close_a_job_that_has_had_no_round_and_no_other() -> None:
    outside = CloseJob("x", "over", outside=True)
    for before in (Document(TWO_OR_THREE), joined(TWO_OR_THREE, "a")):
        assert after(before, outside).closed == "over"
        assert "may not close" in refused(before, CloseJob("x", "over")).reason
    round_1 = formed(TWO_OR_THREE, "a", "b")
    for before in (round_1, after(round_1, Leave("a"), Leave("b"))):
        assert "may not close" in refused(before, outside).reason


def test_first_round_with_fewer_waits_for_the_last_call() -> None:
    document = joined(TWO_OR_THREE, "a", "b")
    assert "last call" in refused(document, Form("a", 0, Waited.NOTHING)).reason
    assert names(after(document, Form("a", 0, Waited.LAST_CALL))) == ["a", "b"]


def test_fewer_than_the_minimum_never_form_a_round() -> None:
    assert "1 of at least 2" in refused(joined(TWO_OR_THREE, "a"), Form("a", 0, Waited.REJOIN)).reason


def test_discrete_sizes_leave_the_odd_one_waiting() -> None:
    document = after(joined(Sizes(2, 4, (2, 4)), "a", "b", "c"), Form("a", 0, Waited.LAST_CALL))
    assert names(document) == ["a", "b"]
    assert [m.agent for m in document.joining] == ["c"]
    assert growth(document) == 0  # it alone would make no larger round
    assert growth(after(document, Join(agent("d"), document.sizes))) == 2


def test_more_than_the_maximum_leaves_the_rest_waiting_without_disturbing_the_round() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Join(agent("d"), TWO_OR_THREE))
    assert world_state(document, 1, "a") == Whole()
    assert "its members take in who waits" in refused(document, Form("d", 1, Waited.REJOIN)).reason


def test_survivors_that_are_all_back_form_the_next_round_at_once() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Evict("a", 1, "c", "gone"))
    document = after(document, Join(agent("b"), TWO_OR_THREE))
    assert "waiting for a of round 1" in refused(document, Form("b", 1, Waited.LAST_CALL)).reason
    document = after(document, Join(agent("a"), TWO_OR_THREE), Form("b", 1, Waited.NOTHING))
    assert (document.round, names(document)) == (2, ["a", "b"])


def test_a_living_member_that_does_not_come_back_is_left_behind_after_the_rejoin_wait() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), *(Join(agent(n), TWO_OR_THREE) for n in "ab"))
    document = after(document, Form("a", 1, Waited.REJOIN))
    assert names(document) == ["a", "b"]
    assert isinstance(world_state(document, 1, "c"), Broken)


def test_survivors_that_are_to_wait_for_a_replacement_form_no_smaller_round() -> None:
    patient = Form("a", 1, Waited.REJOIN, shrink=False)
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Evict("a", 1, "c", "gone"))
    document = after(document, *(Join(agent(n), TWO_OR_THREE) for n in "ab"))
    assert "2 of 3 agents are here: waiting for replacements" in refused(document, patient).reason
    assert names(after(document, replace(patient, shrink=True))) == ["a", "b"]
    replaced = after(document, Join(agent("d"), TWO_OR_THREE), replace(patient, waited=Waited.NOTHING))
    assert sorted(names(replaced)) == ["a", "b", "d"]


def test_who_has_no_survivor_or_no_smaller_size_before_it_waits_for_no_replacement() -> None:
    document = after(joined(TWO_OR_THREE, "a", "b"), Form("a", 0, Waited.LAST_CALL, shrink=False))
    assert names(document) == ["a", "b"]
    alone = after(document, Evict("a", 1, "b", "gone"), Join(agent("a"), TWO_OR_THREE), Leave("a"))
    alone = after(alone, *(Join(agent(n), TWO_OR_THREE) for n in "cd"))
    assert names(after(alone, Form("c", 1, Waited.LAST_CALL, shrink=False))) == ["c", "d"]


def test_joiners_are_taken_in_when_the_members_ask_for_the_next_round() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b"), Join(agent("c"), TWO_OR_THREE))
    assert world_state(document, 1, "a") == Growing(1, None)
    document = after(document, SetBoundary("b", 1, 40))
    assert world_state(document, 1, "a") == Growing(1, 40)
    assert "agreed already" in refused(document, SetBoundary("a", 1, 41)).reason
    document = after(document, *(Join(agent(n), TWO_OR_THREE) for n in "ab"), Form("a", 1, Waited.NOTHING))
    assert (names(document), document.boundary) == (["a", "b", "c"], None)


def test_agents_that_were_started_with_other_sizes_join_where_the_publisher_has_set_them() -> None:
    document = after(
        with_pinned_sizes(Document(TWO_OR_THREE), Sizes(4, 4)), *(Join(agent(n), TWO_OR_THREE) for n in "abc")
    )
    assert "3 of at least 4" in refused(document, Form("a", 0, Waited.REJOIN)).reason
    document = after(document, Join(agent("d"), Sizes(2, 2)), Form("a", 0, Waited.NOTHING))
    assert (names(document), document.sizes) == (["a", "b", "c", "d"], Sizes(4, 4))


def test_sizes_that_are_changed_leave_the_round_alone_until_somebody_comes_or_goes() -> None:
    fixed = with_pinned_sizes(formed(Sizes(2, 2), "a", "b"), Sizes(3, 3))
    assert world_state(fixed, 1, "a") == Whole()
    assert world_state(after(fixed, Join(agent("c"), Sizes(3, 3))), 1, "a") == Growing(1, None)
    small = after(with_pinned_sizes(formed(TWO_OR_THREE, "a", "b", "c"), Sizes(2, 2)), Leave("c"))
    small = after(small, *(Join(agent(n), TWO_OR_THREE) for n in "ab"), Form("a", 1, Waited.NOTHING, shrink=False))
    assert names(small) == ["a", "b"], "nobody is waited for who is not wanted"


# --- fences


@pytest.mark.parametrize(
    "event",
    [
        Form("c", 1, Waited.REJOIN),
        Evict("c", 1, "a", "revenge"),
        Reach("c", 1, "a", False),
        SetBoundary("c", 1, 3),
        CloseJob("c", "over"),
    ],
)
def test_a_member_that_was_evicted_can_do_nothing_in_its_round(event: Any) -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Evict("a", 1, "c", "silent"))
    refused(document, event)


def test_a_member_that_failed_and_stepped_out_may_close_the_job_though_the_others_have_formed_a_round() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Withdraw("c", 1, "ValueError"), Charge("c", 1, "ValueError"))
    document = after(document, *(Join(agent(n), TWO_OR_THREE) for n in "ab"), Form("a", 1, Waited.NOTHING))
    assert after(document, CloseJob("c", "one failure too many")).closed == "one failure too many"
    newer = after(document, Join(agent("c2", 2, incarnation=1), TWO_OR_THREE))
    refused(newer, CloseJob("c", "one failure too many"))


@pytest.mark.parametrize("event", [Evict("a", 1, "b", "late"), Form("a", 1, Waited.REJOIN), Reach("a", 1, "b", False)])
def test_what_was_decided_in_an_old_round_is_refused_in_the_new_one(event: Any) -> None:
    document = after(formed(TWO_OR_THREE, "a", "b"), *(Join(agent(n), TWO_OR_THREE) for n in "ab"))
    document = after(document, Form("a", 1, Waited.NOTHING), *(Join(agent(n), TWO_OR_THREE) for n in "ab"))
    assert "round 2 is the present one" in refused(document, event).reason


def test_an_evicted_member_that_wakes_up_may_join_again() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Evict("a", 1, "c", "silent"))
    document = after(document, *(Join(agent(n), TWO_OR_THREE) for n in "abc"), Form("a", 1, Waited.NOTHING))
    assert names(document) == ["a", "b", "c"]


def test_a_newer_incarnation_replaces_the_older_for_good() -> None:
    old, new = agent("old", 1), agent("new", 1, incarnation=1)
    document = after(Document(TWO_OR_THREE), Join(agent("a", 0), TWO_OR_THREE), Join(old, TWO_OR_THREE))
    document = after(document, Form("a", 0, Waited.LAST_CALL), Join(new, TWO_OR_THREE))
    assert document.gone == (Loss("old", "replaced by new, incarnation 1"),)
    assert refused(document, Join(old, TWO_OR_THREE)).final
    document = after(document, Join(agent("a", 0), TWO_OR_THREE), Form("a", 1, Waited.NOTHING))
    assert names(document) == ["a", "new"]


def test_of_two_lives_of_one_incarnation_the_later_stays() -> None:
    first, second = agent("x1", 0), agent("x2", 0)
    document = after(Document(TWO_OR_THREE), Join(first, TWO_OR_THREE), Join(second, TWO_OR_THREE))
    assert [m.agent for m in document.joining] == ["x2"]
    assert refused(document, Join(first, TWO_OR_THREE)).final


def test_agents_that_disagree_about_sizes_are_told_both() -> None:
    reason = refused(joined(TWO_OR_THREE, "a"), Join(agent("b"), Sizes(4, 4))).reason
    assert "4:4" in reason
    assert "2:3" in reason


def test_a_job_of_which_nobody_is_left_may_be_started_with_other_sizes() -> None:
    document = after(joined(TWO_OR_THREE, "a"), Leave("a"), Join(agent("b"), Sizes(4, 4)))
    assert document.sizes == Sizes(4, 4)


def test_a_closed_job_stays_as_it_is() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b"), CloseJob("a", "done"))
    for event in (Join(agent("c"), TWO_OR_THREE), Form("a", 1, Waited.REJOIN), CloseJob("b", "done")):
        assert refused(document, event).final


# --- reachability (failure 60)


def regrouped(document: Document, who: str) -> Document:
    """The next round, after all of them came back."""
    events = [Join(agent(name), document.sizes) for name in who]
    return after(document, *events, Form(who[0], document.round, Waited.NOTHING))


def test_of_two_that_do_not_reach_each_other_the_lower_index_stays() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Reach("c", 1, "b", False))
    assert world_state(document, 1, "a") == Broken("c does not reach b")
    document = regrouped(document, "abc")
    assert names(document) == ["a", "b"]
    assert [m.agent for m in document.joining] == ["c"]


def test_the_larger_side_of_a_partition_stays_whoever_reports() -> None:
    document = formed(Sizes(1, 5), *"abcde")
    for target in "cde":
        document = after(document, Reach("a", 1, target, False))
    assert names(regrouped(document, "abcde")) == ["b", "c", "d", "e"]


def test_reports_that_come_late_lead_to_the_larger_side_too() -> None:
    document = regrouped(after(formed(Sizes(1, 5), *"abcde"), Reach("a", 1, "c", False)), "abcde")
    assert "c" not in names(document)
    document = regrouped(after(document, Reach("a", 2, "d", False)), "abde")
    assert sorted(names(document)) == ["b", "c", "d", "e"]


def test_who_is_reached_by_nobody_is_not_waited_for_and_who_may_stay_is() -> None:
    sizes = Sizes(1, 3)
    document = after(formed(sizes, "a", "b", "c"), Reach("a", 1, "b", False), Join(agent("b"), sizes))
    document = after(document, Join(agent("c"), sizes))
    assert "waiting for a" in refused(document, Form("b", 1, Waited.NOTHING)).reason, "a or b stays, and a is first"
    document = after(document, Reach("c", 1, "a", False), Form("b", 1, Waited.NOTHING))
    assert names(document) == ["b", "c"]
    assert world_state(document, 1, "a") == Broken("round 2 was formed")
    document = after(document, Join(agent("a"), sizes))
    assert growth(document) == 0
    assert growth(after(document, Reach("b", 2, "a", True), Reach("c", 2, "a", True))) == 1


def test_a_pair_without_which_too_few_are_left_ends_no_round_and_the_next_waits_for_it() -> None:
    document = after(formed(Sizes(2, 2), "a", "b"), Reach("a", 1, "b", False))
    assert world_state(document, 1, "b") == Whole()
    document = after(document, Break("b", 1, "no collective ends"), *(Join(agent(n), Sizes(2, 2)) for n in "ab"))
    assert refused(document, Form("a", 1, Waited.REJOIN)).reason == (
        "1 of at least 2 agents wait, without who does not reach another"
    )
    document = after(document, Reach("a", 1, "b", True), Form("a", 1, Waited.NOTHING))
    assert names(document) == ["a", "b"]


@st.composite
def faults(draw: st.DrawFn) -> tuple[Sizes, str, list[tuple[str, str, bool]]]:
    size = draw(st.integers(2, 7))
    who = "abcdefg"[:size]
    pairs = st.tuples(st.sampled_from(who), st.sampled_from(who), st.booleans()).filter(lambda p: p[0] != p[1])
    return Sizes(draw(st.integers(1, size)), size), who, draw(st.lists(pairs, max_size=20))


@given(faults())
def test_whatever_is_reported_one_round_of_enough_who_reach_each_other_is_formed_or_none(
    found: tuple[Sizes, str, list[tuple[str, str, bool]]],
) -> None:
    """Accusations take nobody out by themselves; in any order of reports and of the same, the same members stay."""
    sizes, who, said = found
    document = formed(sizes, *who)
    for by, target, reaches in said:
        result = apply(document, Reach(by, 1, target, reaches))
        document = result if isinstance(result, Document) else document
    apart = {(r.low, r.high) for r in document.reports if r.active}
    assert names(document) == list(who)
    assert not document.gone
    enough = sizes.largest(len(largest_set(document.members, document.reports)))
    for name in who:
        document = after(document, Join(agent(name), sizes))
    result = apply(document, Form(who[-1], 1, Waited.NOTHING))
    if isinstance(result, Rejected):
        assert not enough
        return
    assert len(names(result)) == enough >= sizes.minimum
    assert not any(low in names(result) and high in names(result) for low, high in apart)
    others = {m.agent for m in result.joining}
    assert others == set(who) - set(names(result)), "who is out waits"
    assert growth(result) == 0, "and nobody is disturbed for it"
    for low, high in apart:
        again = apply(result, Reach(low, 2, high, True))
        result = again if isinstance(again, Document) else result
    if not any(r.active for r in result.reports):
        assert growth(result) == len(others)


def test_an_unreachable_pair_is_not_put_together_again_until_it_is_taken_back() -> None:
    document = regrouped(after(formed(TWO_OR_THREE, "a", "b", "c"), Reach("a", 1, "c", False)), "abc")
    assert names(document) == ["a", "b"]
    assert growth(document) == 0  # no restart for one that could not come in
    assert growth(after(document, Reach("c", 2, "a", True))) == 1


def test_a_pair_that_flaps_is_separated_for_good() -> None:
    document = formed(TWO_OR_THREE, "a", "b", "c")
    for _ in range(MAX_FLAPS - 1):
        document = after(document, Join(agent("c"), TWO_OR_THREE), Reach("a", 1, "c", False), Reach("a", 1, "c", True))
    document = after(document, Join(agent("c"), TWO_OR_THREE), Reach("a", 1, "c", False))
    assert refused(document, Reach("a", 1, "c", True)).final


@given(st.integers(2, 9), st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=12))
def test_the_largest_set_is_the_one_that_trying_all_sets_finds(size: int, pairs: set[tuple[int, int]]) -> None:
    members = [agent(f"m{i}", i) for i in range(size)]
    reports = [Report(f"m{a}", f"m{b}", True, 1) for a, b in pairs if a < b < size]

    def good(chosen: tuple[Member, ...]) -> bool:
        here = {m.agent for m in chosen}
        return not any(r.low in here and r.high in here for r in reports)

    subsets = [tuple(m for i, m in enumerate(members) if mask >> i & 1) for mask in range(2**size)]
    best = max(len(s) for s in subsets if good(s))
    found = largest_set(members, reports)
    assert good(found)
    assert len(found) == best
    assert largest_set(members, reports) == found


def test_many_bad_pairs_leave_a_set_without_one() -> None:
    members = [agent(f"m{i:02}", i) for i in range(2 * EXACT)]
    reports = [Report(f"m{i:02}", f"m{i + 1:02}", True, 1) for i in range(2 * EXACT - 1)]
    here = {m.agent for m in largest_set(members, reports)}
    assert len(here) == EXACT
    assert not any(r.low in here and r.high in here for r in reports)


# --- what processes did


def test_an_agent_that_lost_its_processes_steps_out_and_is_taken_in_again_when_it_asks() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Withdraw("b", 1, "SIGKILL"))
    assert world_state(document, 1, "a") == Broken("b is gone: SIGKILL")
    document = regrouped(document, "ac")
    assert names(document) == ["a", "c"]
    assert document.history == (Setback(1, "b", "SIGKILL", False),)
    assert world_state(after(document, Join(agent("b"), TWO_OR_THREE)), 2, "a") == Growing(1, None)


def test_a_failure_of_the_program_is_charged_once_a_round_even_when_the_next_is_formed() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Withdraw("b", 1, "ValueError"), Withdraw("c", 1, "peer lost"))
    document = after(document, *(Join(agent(name), TWO_OR_THREE) for name in "abc"), Form("a", 1, Waited.NOTHING))
    document = after(document, Charge("b", 1, "ValueError: x"))
    assert document.restarts == 1
    assert "charged already" in refused(document, Charge("c", 1, "peer lost")).reason
    assert "no round 3" in refused(document, Charge("c", 3, "x")).reason
    assert {(s.agent, s.charged) for s in document.history} == {("b", True), ("c", False)}


def test_failures_of_processes_that_were_started_after_a_failure_of_the_round_are_charged_each() -> None:
    """Agents whose programs fail side by side are charged once for each time, whoever is first."""
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Charge("a", 1, "x"), Charge("b", 1, "x", earlier=1))
    assert document.restarts == 2
    assert "charged already" in refused(document, Charge("c", 1, "x")).reason
    assert "charged already" in refused(document, Charge("c", 1, "x", earlier=1)).reason
    assert after(document, Charge("a", 1, "x", earlier=1)) == document
    assert after(document, Charge("c", 1, "x", earlier=2)).restarts == 3


def test_a_failure_that_another_agent_explains_is_charged_to_nobody() -> None:
    perhaps = Charge("a", 1, "peer lost", unless_others=True)
    document = formed(TWO_OR_THREE, "a", "b", "c")
    assert after(document, perhaps).restarts == 1
    assert after(document, Withdraw("a", 1, "peer lost"), perhaps).restarts == 1, "its own setback explains nothing"
    assert "another agent set" in refused(after(document, Withdraw("b", 1, "SIGKILL")), perhaps).reason
    assert "asked to stop" in refused(after(document, Stop("b")), perhaps).reason
    assert after(document, Stop("a"), perhaps).restarts == 1


def test_agents_that_were_in_no_round_are_charged_each_for_itself() -> None:
    """So the agent in a pod that replaces one whose program failed is not taken for it."""
    document = after(formed(TWO_OR_THREE, "a", "b"), Charge("x", 0, "e"), Charge("y", 0, "e"))
    assert document.restarts == 2
    assert after(document, Charge("y", 0, "e")) == document
    assert after(document, Charge("y", 0, "e", earlier=1)).restarts == 3


def test_members_that_do_not_work_together_any_more_meet_again() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Break("a", 1, "a connection broke"))
    assert world_state(document, 1, "b") == Broken("a connection broke")
    assert "over already" in refused(document, Break("b", 1, "again")).reason
    assert names(regrouped(document, "abc")) == ["a", "b", "c"]


def test_the_job_is_finished_when_every_member_has_said_so() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Done("a", 1), Done("b", 1))
    assert world_state(document, 1, "a") == Finishing(2)
    assert "already" in refused(document, Done("a", 1)).reason
    assert after(document, Done("c", 1)).closed == FINISHED


def test_who_has_finished_may_go_and_must_repeat_when_another_has_not() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Done("a", 1), Leave("a"))
    assert world_state(document, 1, "b") == Finishing(1)
    assert document.history == ()
    document = after(document, Done("b", 1), Evict("b", 1, "c", "gone"))
    assert isinstance(world_state(document, 1, "b"), Broken)
    document = after(document, *(Join(agent(name), TWO_OR_THREE) for name in "bc"), Form("b", 1, Waited.NOTHING))
    assert (document.round, document.done) == (2, ())


def test_that_processes_keep_their_memory_is_known_in_later_rounds() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), KeepProcesses("a", 1), Evict("a", 1, "c", "gone"))
    assert regrouped(document, "ab").in_process


# --- members that are asked to stop


def test_a_mark_changes_nothing_for_the_others_and_tells_its_agent_whether_enough_would_stay() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Stop("a"))
    assert world_state(document, 1, "b") == Whole()
    assert world_state(document, 1, "a") == Stopping(1, Staying.ENOUGH)
    document = after(document, Stop("b"))
    assert world_state(document, 1, "a") == world_state(document, 1, "b") == Stopping(2, Staying.FEW)
    assert "known" in refused(document, Stop("a")).reason


def test_all_that_are_asked_leave_together_and_the_others_form_the_next_round_without_them() -> None:
    sizes = Sizes(1, 4)
    document = after(formed(sizes, "a", "b", "c", "d"), Stop("a"), Stop("d"), Drain("d", 1))
    assert document.gone == (Loss("a", LEFT), Loss("d", LEFT))
    assert world_state(document, 1, "a") == world_state(document, 1, "d") == Left()
    assert isinstance(world_state(document, 1, "b"), Broken)
    document = after(document, Join(agent("b"), sizes), Join(agent("c"), sizes), Form("b", 1, Waited.NOTHING))
    assert names(document) == ["b", "c"]
    assert document.stopping == ("a", "d"), "the next round knows whom its members were with"
    assert world_state(document, 1, "a") == Left()
    assert not any(s.charged for s in document.history)


def test_nobody_leaves_if_too_few_would_stay_or_the_round_is_over_anyway() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Stop("a"), Stop("b"))
    assert "1 would stay" in refused(document, Drain("a", 1)).reason
    lost = after(formed(Sizes(1, 3), "a", "b", "c"), Stop("a"), Evict("b", 1, "c", "gone"))
    assert "over" in refused(lost, Drain("a", 1)).reason
    assert "asked to stop" in refused(formed(TWO_OR_THREE, "a", "b"), Drain("a", 1)).reason


def test_a_size_that_is_not_allowed_keeps_them_too() -> None:
    document = after(formed(Sizes(2, 4, (2, 4)), "a", "b", "c", "d"), Stop("a"))
    assert world_state(document, 1, "a") == Stopping(1, Staying.ENOUGH)  # two of the three go on
    document = after(document, Stop("b"), Stop("c"))
    assert world_state(document, 1, "a") == Stopping(3, Staying.FEW)


def test_an_agent_that_waits_takes_the_place_of_one_that_is_asked_to_stop_in_a_round_of_a_fixed_size() -> None:
    fixed = Sizes(3, 3)
    document = after(formed(fixed, "a", "b", "c"), Stop("a"))
    assert world_state(document, 1, "a") == Stopping(1, Staying.FEW)
    document = after(document, Join(agent("d"), fixed))
    assert world_state(document, 1, "a") == Stopping(1, Staying.ALL)
    document = after(document, Drain("a", 1), Join(agent("b"), fixed), Join(agent("c"), fixed))
    assert names(after(document, Form("b", 1, Waited.NOTHING))) == ["d", "b", "c"]


def test_an_agent_that_waits_takes_no_place_if_it_is_asked_to_stop_or_reaches_somebody_not() -> None:
    fixed = Sizes(3, 3)
    document = after(formed(fixed, "a", "b", "c"), Stop("a"), Join(agent("d"), fixed))
    assert staying(after(document, Stop("d"))) is Staying.FEW
    assert staying(after(document, Reach("b", 1, "d", False))) is Staying.FEW


def test_one_member_has_to_stay_because_who_waits_has_no_state() -> None:
    sizes = Sizes(1, 2)
    document = after(formed(sizes, "a", "b"), Join(agent("c"), sizes), Join(agent("d"), sizes), Stop("a"))
    assert staying(document) is Staying.ALL
    document = after(document, Stop("b"), Drain("a", 1))
    assert [loss.agent for loss in document.gone] == ["b"]


def test_if_all_members_are_asked_to_stop_one_hands_the_state_on_before_it_leaves_too() -> None:
    fixed = Sizes(3, 3)
    document = replace(formed(fixed, "a", "b", "c"), ruled=True)
    asked = after(document, Stop("a"), Stop("b"), Stop("c"))
    assert world_state(asked, 1, "a") == Stopping(3, Staying.NOBODY, Coming.UNKNOWN)
    document = replace(asked, surge=3)
    assert world_state(document, 1, "a") == Stopping(3, Staying.NOBODY, Coming.ANNOUNCED)
    document = after(document, Join(agent("d"), fixed))
    assert staying(document) is Staying.FEW
    document = after(document, Join(agent("e"), fixed), Join(agent("f"), fixed))
    assert staying(document) is Staying.ALL
    document = after(document, Drain("b", 1))
    assert [loss.agent for loss in document.gone] == ["b", "c"]
    document = after(document, Join(agent("a"), fixed), Form("a", 1, Waited.NOTHING))
    assert names(document) == ["a", "d", "e"], "f would be in it, if nobody had to hand the state on"
    assert world_state(document, 2, "a") == Stopping(1, Staying.ALL, Coming.ANNOUNCED)
    document = after(document, Drain("a", 2), *(Join(agent(n), fixed) for n in "de"), Form("d", 2, Waited.NOTHING))
    assert names(document) == ["f", "d", "e"]


def test_the_only_worker_of_a_job_is_waited_for_until_another_can_load_its_commit() -> None:
    one = Sizes(1, 1)
    document = replace(after(formed(one, "a"), Stop("a")), ruled=True, surge=1)
    assert world_state(document, 1, "a") == Stopping(1, Staying.NOBODY, Coming.ANNOUNCED)
    document = after(document, Join(agent("b"), one))
    assert world_state(document, 1, "a") == Stopping(1, Staying.NOBODY, Coming.UNKNOWN)
    assert "0 would stay" in refused(document, Drain("a", 1)).reason


def test_who_was_asked_to_stop_and_is_out_does_not_come_back() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Stop("a"), Evict("b", 1, "a", "its lease expired"))
    again = refused(document, Join(agent("a"), TWO_OR_THREE))
    assert again.final
    assert "asked to stop" in again.reason


def test_who_is_asked_to_stop_is_out_when_its_replacement_joins() -> None:
    document = after(Document(TWO_OR_THREE), *(Join(agent(n, i), TWO_OR_THREE) for i, n in enumerate("abc")))
    document = after(document, Form("a", 0, Waited.NOTHING), Stop("c"))
    document = after(document, Join(agent("d", 2, incarnation=1), TWO_OR_THREE))
    assert world_state(document, 1, "c") == Left()
    assert isinstance(world_state(document, 1, "a"), Broken)


def test_who_is_asked_to_stop_while_others_are_lost_meets_the_survivors_again_to_save() -> None:
    document = after(formed(TWO_OR_THREE, "a", "b", "c"), Stop("a"), Stop("b"), Evict("a", 1, "c", "gone"))
    document = after(document, *(Join(agent(n), TWO_OR_THREE) for n in "ab"), Form("a", 1, Waited.NOTHING))
    assert names(document) == ["a", "b"]
    assert world_state(document, 2, "a") == Stopping(2, Staying.NOBODY)


def test_agents_that_never_trained_form_no_round_when_all_of_them_stop() -> None:
    document = after(joined(TWO_OR_THREE, "a", "b", "c"), Stop("a"), Stop("b"), Stop("c"))
    assert "asked to stop" in refused(document, Form("a", 0, Waited.LAST_CALL)).reason


def test_of_more_than_fit_those_that_stop_are_left_out() -> None:
    sizes = Sizes(2, 4, (2, 4))
    document = after(formed(sizes, "a", "b", "c", "d"), Stop("a"), Evict("a", 1, "d", "gone"))
    document = after(document, *(Join(agent(n), sizes) for n in "abc"), Form("a", 1, Waited.NOTHING))
    assert names(document) == ["c", "b"]  # each keeps its place in a pair


# --- bytes


text = st.text(max_size=20)
agent_ids = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
members = st.builds(
    Member,
    index=st.integers(0, 2**16 - 1),
    agent=agent_ids,
    incarnation=st.integers(0, 2**40),
    local_world_size=st.integers(1, 64),
    address=text,
    store_port=st.integers(0, 65535),
    link_port=st.integers(0, 65535),
)
rosters = st.lists(members, max_size=4, unique_by=lambda m: m.agent).map(tuple)


@given(
    st.builds(
        Document,
        sizes=st.sampled_from([TWO_OR_THREE, Sizes(2, 8, (2, 4, 8))]),
        round=st.integers(0, 2**53 - 1),
        members=rosters,
        gone=st.lists(st.builds(Loss, agent_ids, text), max_size=3).map(tuple),
        joining=rosters,
        seats=st.lists(
            st.builds(Seat, st.integers(0, 99), agent_ids, st.integers(0, 99)), max_size=3, unique_by=lambda s: s.index
        ).map(tuple),
        reports=st.lists(st.builds(Report, agent_ids, agent_ids, st.booleans(), st.integers(0, 9)), max_size=3).map(
            tuple
        ),
        broken=st.none() | text,
        boundary=st.none() | st.integers(0, 2**40),
        done=st.lists(agent_ids, max_size=3).map(tuple),
        stopping=st.lists(agent_ids, max_size=3).map(tuple),
        in_process=st.booleans(),
        restarts=st.integers(0, 99),
        history=st.lists(st.builds(Setback, st.integers(0, 9), agent_ids, text, st.booleans()), max_size=3).map(tuple),
        closed=st.none() | text,
    )
)
def test_any_document_survives_its_bytes(document: Document) -> None:
    assert decode(encode(document)) == document


@given(members, st.integers(0, 99))
def test_a_join_request_survives_its_bytes(member: Member, number: int) -> None:
    join_request = JoinRequest(member, number, TWO_OR_THREE)
    assert decode_join_request(join_request.encode()) == join_request


GOOD = encode(formed(TWO_OR_THREE, "a", "b"))


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"[]", "object"),
        (b"{}", "version"),
        (GOOD.replace(b'"version":1', b'"version":2'), "version"),
        (GOOD.replace(b'"round":1', b'"round":-1'), "round"),
        (GOOD.replace(b'"round":1', b'"round":true'), "round"),
        (GOOD.replace(b'"round":1', b'"round":1e400'), "round"),
        (GOOD.replace(b'"a"', b'"a b"', 1), "agent"),
        (GOOD.replace(b'"a"', b'"' + b"a" * 65 + b'"', 1), "agent"),
        (GOOD.replace(b'"members":[', b'"members":["x",'), "members"),
        (GOOD.replace(b'"b"', b'"a"', 1), "members"),
        (GOOD.replace(b'"sizes":[2,3', b'"sizes":[3,2'), "sizes"),
        (GOOD.replace(b'"closed":null', b'"closed":"' + b"x" * 201 + b'"'), "closed"),
        (b" " * (MAX_BYTES + 1), "bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bytes_that_are_no_document_are_refused_by_field(data: bytes, named: str) -> None:
    with pytest.raises(DocumentInvalid, match=named):
        decode(data)


@given(st.binary(max_size=200) | st.integers(0, len(GOOD) - 1).map(lambda i: GOOD[:i] + b"9" + GOOD[i + 1 :]))
def test_damaged_bytes_are_refused_or_are_a_document(data: bytes) -> None:
    try:
        document = decode(data)
    except DocumentInvalid:
        return
    assert decode(encode(document)) == document


def test_the_largest_world_fits_its_bound() -> None:
    host = "trainer-with-a-long-name-0000.default.svc.cluster.local"
    sizes = Sizes(1, MAX_MEMBERS)
    everyone = tuple(
        Member(i, f"trainer-{i:04}-123456-0123abcd", 3, 8, f"{host}", 45000, 46000) for i in range(MAX_MEMBERS)
    )
    seats = tuple(Seat(m.index, m.agent, m.incarnation) for m in everyone)
    stopping = tuple(m.agent for m in everyone)
    document = Document(sizes, round=9, members=everyone, seats=seats, stopping=stopping)
    assert len(encode(document)) <= MAX_BYTES


def test_an_agent_more_than_fits_is_refused() -> None:
    sizes = Sizes(1, MAX_MEMBERS)
    everyone = tuple(Member(i, f"a{i}") for i in range(MAX_MEMBERS))
    document = replace(Document(sizes), joining=everyone)
    assert "wait already" in refused(document, Join(Member(5, "one-more"), sizes)).reason
