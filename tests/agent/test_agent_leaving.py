"""What an agent does that is asked to stop: it leaves, if the others can train on; else all stop together."""

from __future__ import annotations

import signal
from copy import copy
from typing import Any

import pytest

from everstep.agent.decide import events as e
from everstep.agent.decide.events import Fault, Purpose
from everstep.agent.decide.stopping import advice
from everstep.contract import exit_codes
from everstep.contract.document import LEFT, Setback
from everstep.membership import commands as c
from everstep.membership.draining import Coming, Staying
from everstep.membership.world_state import Broken, Finishing, Left, Stopping
from support.agent.play import KILL, Play, keeping, kinds, plain, round_of

TERM, INT = signal.SIGTERM, signal.SIGINT


def timers(told: tuple[e.Instruction, ...]) -> dict[Purpose, e.Timer]:
    return {i.purpose: i for i in told if isinstance(i, e.Timer)}


def noticed(play: Play, count: int = 1) -> dict[Purpose, e.Timer]:
    """It is asked to stop, and the store says that enough would stay."""
    told = play.take(e.StopRequested(TERM, enough=True))
    assert told[0] == c.Stop("a")
    return timers((*told, *play.take(e.Changed(1, Stopping(count, Staying.ENOUGH)))))


def test_who_is_asked_to_stop_trains_on_until_nobody_else_was_asked_for_a_second_and_leaves() -> None:
    play = keeping()
    told = noticed(play)
    assert told[Purpose.QUIET].seconds == 1.0
    assert play.take(e.Elapsed(told[Purpose.QUIET])) == (c.Drain("a", 1),)
    assert play.take(e.Changed(1, Left())) == (e.Drained((0,)),)
    (finish,) = play.exits(0, exit_codes.PREEMPTED)
    assert isinstance(finish, e.Finish)
    assert finish.code == exit_codes.PREEMPTED


def test_others_that_are_asked_meanwhile_are_waited_for() -> None:
    play = keeping()
    told = noticed(play)
    assert play.take(e.Changed(1, Stopping(2, Staying.ENOUGH))) == ()
    (again,) = play.take(e.Elapsed(told[Purpose.QUIET]))
    assert isinstance(again, e.Timer)
    assert play.take(e.Elapsed(again)) == (c.Drain("a", 1),)


def test_when_too_few_would_stay_all_are_asked_to_save_at_once() -> None:
    play = keeping()
    noticed(play)
    assert play.take(e.Changed(1, Stopping(2, Staying.FEW)))[0] == e.Signal((0,), TERM)
    (finish,) = play.exits(0, exit_codes.PREEMPTED)
    assert finish.code == exit_codes.PREEMPTED


def test_where_a_replacement_may_come_it_trains_on_until_one_waits_and_leaves() -> None:
    for others in (Staying.FEW, Staying.ENOUGH):
        play = keeping(grace_seconds=30)
        play.take(e.StopRequested(TERM, enough=True))
        told = timers(play.take(e.Changed(1, Stopping(1, others, coming=Coming.UNKNOWN))))
        assert play.take(e.Elapsed(told[Purpose.QUIET])) == ()
        assert play.take(e.Changed(1, Stopping(1, Staying.ALL, coming=Coming.UNKNOWN))) == (c.Drain("a", 1),)
        assert play.take(e.Changed(1, Left())) == (e.Drained((0,)),)


def test_a_replacement_that_waits_already_shortens_no_wait_for_others_that_are_asked() -> None:
    play = keeping()
    play.take(e.StopRequested(TERM, enough=True))
    told = timers(play.take(e.Changed(1, Stopping(1, Staying.ALL, coming=Coming.UNKNOWN))))
    assert play.take(e.Changed(1, Stopping(2, Staying.FEW, coming=Coming.UNKNOWN))) == ()
    again = timers(play.take(e.Elapsed(told[Purpose.QUIET])))
    assert play.take(e.Elapsed(again[Purpose.QUIET])) == ()
    # A third one is asked: whoever is asked with it is waited for again.
    third = timers(play.take(e.Changed(1, Stopping(3, Staying.ALL, coming=Coming.UNKNOWN))))
    assert play.take(e.Elapsed(third[Purpose.QUIET])) == (c.Drain("a", 1),)


@pytest.mark.parametrize(
    ("others", "then"), [(Staying.ENOUGH, c.Drain("a", 1)), (Staying.FEW, e.Signal((0,), TERM))], ids=str
)
def test_a_replacement_that_does_not_come_in_a_third_of_its_time_is_waited_for_no_longer(
    others: Staying, then: Any
) -> None:
    play = keeping(grace_seconds=30)
    told = timers(play.take(e.StopRequested(TERM, enough=True)))
    told |= timers(play.take(e.Changed(1, Stopping(1, others, coming=Coming.UNKNOWN))))
    play.take(e.Elapsed(told[Purpose.QUIET]))
    late = play.take(e.Elapsed(told[Purpose.NOTICE]))
    assert late[0] == then
    if others is Staying.ENOUGH:  # and a store that does not let it leave is waited for as long
        (last,) = timers(late).values()
        assert last.seconds == 10
        assert play.take(e.Elapsed(last))[0] == e.Signal((0,), TERM)


def test_all_that_are_asked_save_together_if_no_others_are_announced_within_a_second() -> None:
    play = keeping()
    play.take(e.StopRequested(TERM, enough=True))
    told = timers(play.take(e.Changed(1, Stopping(3, Staying.NOBODY, Coming.UNKNOWN))))
    assert play.take(e.Elapsed(told[Purpose.QUIET]))[0] == e.Signal((0,), TERM)


def test_without_a_publisher_all_that_are_asked_save_together_at_once() -> None:
    play = keeping()
    play.take(e.StopRequested(TERM, enough=True))
    assert play.take(e.Changed(1, Stopping(3, Staying.NOBODY, Coming.NEVER)))[0] == e.Signal((0,), TERM)


def test_all_that_are_asked_train_on_while_others_are_announced() -> None:
    play = keeping(grace_seconds=30)
    play.take(e.StopRequested(TERM, enough=True))
    told = timers(play.take(e.Changed(1, Stopping(3, Staying.NOBODY, Coming.UNKNOWN))))
    assert play.take(e.Changed(1, Stopping(3, Staying.NOBODY, Coming.ANNOUNCED))) == ()
    assert play.take(e.Elapsed(told[Purpose.QUIET])) == ()
    assert play.take(e.Changed(1, Stopping(3, Staying.FEW, Coming.ANNOUNCED))) == ()
    assert play.take(e.Changed(1, Stopping(3, Staying.ALL, Coming.ANNOUNCED))) == (c.Drain("a", 1),)


def test_announced_others_that_are_taken_back_are_not_waited_for() -> None:
    play = keeping(grace_seconds=30)
    play.take(e.StopRequested(TERM, enough=True))
    told = timers(play.take(e.Changed(1, Stopping(3, Staying.NOBODY, Coming.ANNOUNCED))))
    play.take(e.Elapsed(told[Purpose.QUIET]))
    assert play.take(e.Changed(1, Stopping(3, Staying.NOBODY, Coming.UNKNOWN)))[0] == e.Signal((0,), TERM)


def test_the_last_one_leaves_only_when_a_step_was_made_together_with_those_that_have_come() -> None:
    play = keeping(grace_seconds=30)
    play.take(e.StopRequested(TERM, enough=True))
    told = timers(play.take(e.Changed(1, Stopping(3, Staying.ALL, Coming.ANNOUNCED))))
    play.take(e.Elapsed(told[Purpose.QUIET]))
    play.take(e.Changed(1, Broken("b is gone")))
    play.form(2, "a", "d", "e", keeps=True)
    told = timers(play.take(e.Changed(2, Stopping(1, Staying.ALL, Coming.UNKNOWN))))
    again = timers(play.take(e.Elapsed(told[Purpose.QUIET])))  # the state may be on its way to the others
    play.take(e.Trains(0, play.pid(), 2, 6))
    assert play.take(e.Elapsed(again[Purpose.QUIET])) == (c.Drain("a", 2),)


def test_one_of_several_that_have_the_state_leaves_while_it_is_handed_on() -> None:
    play = keeping(grace_seconds=30)
    play.take(e.Changed(1, Broken("c is gone")))
    play.form(2, "a", "b", "d", keeps=True)
    play.take(e.StopRequested(TERM, enough=True))
    told = timers(play.take(e.Changed(2, Stopping(1, Staying.ALL, Coming.UNKNOWN))))
    assert play.take(e.Elapsed(told[Purpose.QUIET])) == (c.Drain("a", 2),)


def test_processes_without_memory_wait_for_no_replacement() -> None:
    play = plain()
    play.take(e.StopRequested(TERM, enough=True))
    told = timers(play.take(e.Changed(1, Stopping(1, Staying.ENOUGH, coming=Coming.UNKNOWN))))
    assert play.take(e.Elapsed(told[Purpose.QUIET]))[0] == e.Signal((0, 1), TERM)


def test_where_the_others_are_known_to_be_too_few_the_signal_is_passed_on_at_once() -> None:
    play = keeping()
    assert play.take(e.StopRequested(TERM, enough=False))[0] == e.Signal((0,), TERM)


def test_another_signal_is_passed_on_at_once() -> None:
    play = keeping()
    assert play.take(e.StopRequested(signal.SIGHUP, enough=True))[0] == e.Signal((0,), signal.SIGHUP)


def test_ctrl_c_asks_processes_of_the_session_to_save_as_sigterm_does() -> None:
    play = keeping(2)
    assert e.Signal((0, 1), TERM) in play.take(e.StopRequested(INT))
    play.exits(0, exit_codes.PREEMPTED)
    (finish,) = play.exits(1, exit_codes.PREEMPTED)
    assert (finish.code, finish.why) == (exit_codes.PREEMPTED, "asked to stop by SIGINT")


def test_ctrl_c_at_one_agent_of_several_lets_the_others_train_on() -> None:
    play = keeping()
    assert c.Stop("a") in play.take(e.StopRequested(INT, enough=True))
    play.take(e.Changed(1, Stopping(1, Staying.ENOUGH)))
    assert timers(play.take(e.Changed(1, Left()))) == {}
    (finish,) = play.exits(0, exit_codes.PREEMPTED)
    assert finish.code == exit_codes.PREEMPTED


def test_scripts_of_their_own_get_ctrl_c_as_it_is_and_are_killed_after_five_seconds() -> None:
    play = plain()
    told = play.take(e.StopRequested(INT))
    assert e.Signal((0, 1), INT) in told
    soonest = min((i for i in told if isinstance(i, e.Timer) and i.purpose is Purpose.GRACE), key=lambda t: t.seconds)
    assert soonest.seconds == 5
    play.exits(0, -INT)
    assert play.take(e.Elapsed(soonest)) == (e.Signal((1,), KILL),)
    (finish,) = play.exits(1, -KILL)
    assert finish.code == 128 + INT


@pytest.mark.parametrize("play", [plain(2), keeping(2)])
@pytest.mark.parametrize("enough", [False, True])
def test_a_second_ctrl_c_kills_all_at_once_but_not_one_that_a_wrapper_repeats(play: Play, enough: bool) -> None:
    play = copy(play)
    again = timers(play.take(e.StopRequested(INT, enough)))[Purpose.AGAIN]
    assert play.take(e.StopRequested(INT, enough)) == ()
    play.take(e.Elapsed(again))
    assert e.Signal((0, 1), KILL) in play.take(e.StopRequested(INT, enough))
    play.exits(0, -KILL)
    (finish,) = play.exits(1, -KILL)
    assert finish.code == 128 + INT


def test_ctrl_c_after_sigterm_is_a_first_one() -> None:
    play = keeping()
    play.take(e.StopRequested(TERM))
    assert e.Signal((0,), KILL) not in play.take(e.StopRequested(INT))


def test_a_person_is_told_what_ctrl_c_does_and_what_another_would() -> None:
    for play, says in ((keeping(), "save and stop"), (plain(), "in 5 s are killed")):
        first = advice(play.state, INT)
        assert says in first
        assert "Ctrl-C again to kill them at once" in first
        again = timers(play.take(e.StopRequested(INT)))[Purpose.AGAIN]
        assert advice(play.state, INT) == ""
        play.take(e.Elapsed(again))
        assert advice(play.state, INT) == "asked to stop by SIGINT again: all processes are killed"


def test_a_store_that_does_not_answer_makes_it_stop_with_all_in_a_third_of_its_time() -> None:
    play = keeping(grace_seconds=9)
    told = timers(play.take(e.StopRequested(TERM, enough=True)))
    assert told[Purpose.NOTICE].seconds == 3
    assert play.take(e.Elapsed(told[Purpose.NOTICE]))[0] == e.Signal((0,), TERM)


def test_a_leaver_that_reaches_no_end_of_a_step_is_killed_when_its_time_is_over() -> None:
    play = keeping(grace_seconds=9)
    told = noticed(play)
    assert told[Purpose.GRACE].seconds == 9
    play.take(e.Elapsed(told[Purpose.QUIET]))
    play.take(e.Changed(1, Left()))
    assert play.take(e.Elapsed(told[Purpose.GRACE])) == (e.Signal((0,), KILL),)
    (finish,) = play.exits(0, -9)
    assert finish.code == exit_codes.PREEMPTED


def test_of_several_processes_all_are_told_to_leave() -> None:
    play = keeping(2)
    told = noticed(play)
    play.take(e.Elapsed(told[Purpose.QUIET]))
    assert play.take(e.Changed(1, Left())) == (e.Drained((0, 1)),)
    assert play.exits(0, exit_codes.PREEMPTED) == ()
    assert kinds(play.exits(1, exit_codes.PREEMPTED)) == ["Finish"]


def test_the_survivors_take_the_next_round_at_the_end_of_their_step() -> None:
    play = keeping()
    play.take(e.Changed(1, Broken(f"c is gone: {LEFT}")))
    history = (Setback(1, "c", LEFT, False),)
    told = play.take(e.Formed(round_of(2, "a", "b"), False, history, ("c",)))
    assert told == (e.Announce((0,), round_of(2, "a", "b"), True),)


@pytest.mark.parametrize(
    ("stopping", "why"),
    [
        (("c",), "SIGKILL"),  # it was asked to stop, and died before it left
        ((), LEFT),  # and one that is not there was not asked
    ],
)
def test_survivors_of_one_that_died_leave_their_step(stopping: Any, why: str) -> None:
    play = keeping()
    play.take(e.Changed(1, Broken("c is gone")))
    told = play.take(e.Formed(round_of(2, "a", "b"), False, (Setback(1, "c", why, False),), stopping))
    assert told[0] == e.Announce((0,), round_of(2, "a", "b"), False)


def test_a_round_that_ends_before_it_has_left_is_followed_by_the_next_and_decided_there() -> None:
    play = keeping()
    told = noticed(play)
    assert play.take(e.Changed(1, Broken("c is gone"))) == (e.JoinNext(1),)
    assert play.take(e.Elapsed(told[Purpose.QUIET])) == ()
    play.form(2, "a", "b")
    play.take(e.Trains(0, play.pid(), 2, 6))
    (quiet,) = play.take(e.Changed(2, Stopping(1, Staying.ENOUGH)))
    assert isinstance(quiet, e.Timer)
    assert play.take(e.Elapsed(quiet)) == (c.Drain("a", 2),)


def test_who_is_asked_with_all_others_in_a_round_that_ends_meets_them_again_to_save() -> None:
    play = keeping()
    noticed(play)
    play.take(e.Changed(1, Broken("c is gone")))
    assert e.Announce((0,), round_of(2, "a", "b"), False) in play.form(2, "a", "b")
    assert play.take(e.Changed(2, Stopping(2, Staying.FEW)))[0] == e.Signal((0,), TERM)


def test_who_has_to_stop_while_it_joins_takes_its_place_in_the_round_that_forms_so_that_all_can_save() -> None:
    play = keeping(grace_seconds=9)
    told = timers(play.take(e.StopRequested(TERM, enough=True)))
    play.take(e.Changed(1, Broken("c is gone")))
    play.take(e.Elapsed(told[Purpose.NOTICE]))
    assert e.Announce((0,), round_of(2, "a", "b"), False) in play.form(2, "a", "b")


def test_a_process_that_dies_meanwhile_is_not_replaced() -> None:
    play = keeping()
    noticed(play)
    assert kinds(play.exits(0, -9)) == ["Withdraw", "Finish"]


def test_processes_that_succeed_meanwhile_end_it_well() -> None:
    play = keeping()
    noticed(play)
    play.take(e.Changed(1, Finishing(1)))
    done, finish = play.exits(0, 0)
    assert done == c.Done("a", 1)
    assert finish.code == exit_codes.OK


def test_processes_that_do_not_speak_and_end_with_0_meanwhile_may_have_heard_the_signal() -> None:
    play = plain()
    noticed(play)
    assert play.exits(0, 0) == ()
    (finish,) = play.exits(1, 0)
    assert finish.code == 128 + TERM


def test_a_seat_that_somebody_else_took_meanwhile_ends_it_as_preempted() -> None:
    play = keeping()
    noticed(play)
    play.take(e.Changed(1, Broken("a is gone: replaced by d")))
    play.take(e.NotFormed("replaced"))
    (finish,) = play.exits(0, -9)
    assert finish.code == exit_codes.PREEMPTED


def test_processes_that_do_not_speak_get_the_signal_when_it_is_quiet_and_the_agent_leaves_with_them() -> None:
    play = plain()
    told = noticed(play)
    assert play.take(e.Elapsed(told[Purpose.QUIET]))[0] == e.Signal((0, 1), TERM)
    play.exits(0, -15)
    (finish,) = play.exits(1, -15)
    assert finish.code == exit_codes.PREEMPTED


def test_processes_that_another_agents_signal_took_along_are_forked_again_and_nobody_is_charged() -> None:
    play = plain(1)
    told = play.exits(0, exit_codes.PREEMPTED, Fault.LEAVER, "asked to stop")
    assert told == (c.Break("a", 1, "asked to stop"), e.JoinNext(1))
    assert kinds(play.form(2, "a")) == ["Fork"]


def test_processes_that_do_not_speak_are_not_forked_for_another_round_after_the_signal() -> None:
    play = plain()
    noticed(play)
    told = play.take(e.Changed(1, Broken("b is gone")))
    assert told[:2] == (c.Withdraw("a", 1, LEFT), e.Signal((0, 1), TERM))
