"""Which members have left a job's rounds: what tells a lost member from a lost spare when the agents were faster."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from everstep.contract.document import LEFT, Document, Loss, Member, Seat, Setback, Sizes
from everstep_operator.round_view import RoundView
from everstep_operator.rounds.departures import Departures

START = datetime(2026, 1, 1, tzinfo=UTC)


def document(
    round_: int, members: str, *, joining: str = "", gone: str = "", done: str = "", history: tuple[Setback, ...] = ()
) -> Document:
    """Agents are letters, and worker 0 is a; a capital is that worker's next incarnation."""
    seats = {agent.lower(): agent for agent in "abc" + members + joining}
    return Document(
        Sizes(1, 2),
        round=round_,
        members=tuple(map(member, members)),
        joining=tuple(map(member, joining)),
        gone=tuple(Loss(agent, "killed") for agent in gone),
        done=tuple(done),
        history=history,
        seats=tuple(Seat(member(agent).index, agent, member(agent).incarnation) for agent in seats.values()),
    )


def member(agent: str) -> Member:
    return Member("abc".index(agent.lower()), agent, int(agent.isupper()))


def seen(*documents: Document) -> RoundView:
    departures, before = Departures(), None
    for second, now in enumerate(documents):
        departures.see(before, now, START + timedelta(seconds=second))
        before = now
    return departures.added_to(RoundView(0))


def test_member_that_is_not_in_the_next_round_has_left_at_that_moment() -> None:
    view = seen(document(1, "ab", joining="c"), document(2, "ac"))
    assert view.left == ((1, 0),)
    assert view.left_at == START + timedelta(seconds=1)


def test_member_that_is_gone_has_left_when_it_went_and_not_when_the_next_round_formed() -> None:
    view = seen(document(1, "ab", joining="c"), document(1, "ab", joining="c", gone="b"), document(2, "ac"))
    assert view.left == ((1, 0),)
    assert view.left_at == START + timedelta(seconds=1)


def test_member_that_asks_for_the_next_round_has_not_left() -> None:
    assert seen(document(1, "ab"), document(1, "ab", joining="a", gone="b"), document(2, "a", joining="b")).left == ()


def test_worker_that_came_back_as_a_spare_is_one_though_it_left_a_round_before() -> None:
    back = document(2, "ac", joining="b")
    assert seen(document(1, "ab", joining="c"), document(2, "ac"), back, document(2, "ac")).left == ()


def test_replaced_worker_is_forgotten_when_its_successor_comes() -> None:
    assert seen(document(1, "ab", joining="c"), document(2, "ac"), document(2, "ac", joining="B")).left == ()


def test_member_that_was_asked_to_stop_left_in_order_until_it_comes_back() -> None:
    running = document(1, "ab", joining="c")
    leaving = replace(running, gone=(Loss("b", LEFT),))
    view = seen(running, leaving, document(2, "ac"))
    assert view.drained == {(1, 0)} == set(view.left)
    assert seen(running, document(1, "ab", joining="c", gone="b"), document(2, "ac")).drained == set()
    assert seen(running, leaving, document(2, "ac", joining="B")).drained == set()


def test_new_leader_reads_who_left_in_order() -> None:
    view = seen(document(2, "ac", history=(Setback(1, "b", LEFT, False),)))
    assert view.drained == {(1, 0)} == set(view.left)


def test_spare_that_goes_has_left_no_round() -> None:
    assert seen(document(1, "ab", joining="c"), document(1, "ab")).left == ()


def test_member_that_had_finished_is_not_missed() -> None:
    assert seen(document(1, "ab", done="b"), document(1, "ab", gone="b", done="b")).left == ()


def test_document_that_is_lost_tells_nothing() -> None:
    assert Departures().added_to(RoundView(3)) == RoundView(3)
    departures = Departures()
    departures.see(document(1, "ab"), document(2, "a"), START)
    departures.see(document(2, "a"), None, START)
    assert departures.added_to(RoundView(2)).left == ()


def test_new_leader_reads_in_the_document_who_has_left_and_knows_no_time() -> None:
    lost = document(2, "ac", history=(Setback(1, "b", "killed", False),))
    assert (seen(lost).left, seen(lost).left_at) == (((1, 0),), None)
    fresh = seen(lost, document(2, "ac", gone="c", history=lost.history))
    assert (fresh.left, fresh.left_at) == (((1, 0), (2, 0)), START + timedelta(seconds=1))


def test_new_leader_takes_nobody_for_lost_who_is_here_was_replaced_or_was_in_no_round() -> None:
    history = (Setback(1, "b", "its process was killed", False), Setback(0, "c", "it fails", True))
    assert seen(document(2, "ab", history=history)).left == ()
    assert seen(document(2, "a", joining="b", history=history)).left == ()
    assert seen(document(2, "a", joining="B", history=history)).left == ()
    assert seen(document(2, "a", done="b", gone="b", history=history)).left == ()
