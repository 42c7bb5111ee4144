"""What an agent does next, situation by situation, and in any order of events that can be."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest

from everstep.agent.decide import events as e
from everstep.agent.decide.events import Fault, Purpose
from everstep.agent.decide.machine import LINGER_SECONDS, MOST_OUTSIDE, MOST_STALLS
from everstep.agent.decide.state import SlotPhase, State
from everstep.contract import exit_codes
from everstep.contract.document import FINISHED, Setback
from everstep.membership import commands as c
from everstep.membership.draining import Coming, Staying
from everstep.membership.world_state import Broken, Closed, Finishing, Growing, Left, Stopping, Whole
from support.agent.play import KILL, Play, keeping, kinds, plain, round_of

WALKS = int(os.environ.get("EVERSTEP_WALKS", "300"))


# --- processes that do not speak


def test_the_first_round_is_joined_before_processes_are_forked_in_it() -> None:
    play = Play(2)
    assert play.take(e.Began(False)) == (e.JoinNext(0),)
    (fork,) = play.form(1, "a", "b")
    assert fork == e.Fork((0, 1), round_of(1, "a", "b"))


def test_when_the_round_is_over_they_are_killed_at_once_and_forked_anew_when_all_are_gone() -> None:
    play = plain()
    assert play.take(e.Changed(1, Broken("b is gone"))) == (e.Signal((0, 1), KILL), e.JoinNext(1))
    assert play.exits(0, -9) == ()
    assert play.form(2, "a") == ()
    assert play.exits(1, -9) == (e.Fork((0, 1), round_of(2, "a")),)


def test_a_program_error_ends_the_round_for_all_is_charged_and_others_processes_here_are_killed() -> None:
    play = plain(max_restarts=1)
    told = play.exits(1, 1, Fault.PROGRAM, "ValueError")
    assert told == (c.Break("a", 1, "ValueError"), c.Charge("a", 1, "ValueError"), e.Signal((0,), KILL), e.JoinNext(1))
    assert play.take(e.Charged(1)) == ()


def test_more_failures_than_allowed_end_the_agent_with_the_code_of_the_last_and_the_job_where_nobody_restarts_it() -> (
    None
):
    play = plain(max_restarts=1)
    play.exits(1, 3, Fault.PROGRAM, "ValueError")
    told = play.take(e.Charged(2))
    assert kinds(told) == ["CloseJob"]  # the other process is being killed already
    (finish,) = play.exits(0, -9)
    assert isinstance(finish, e.Finish)
    assert finish.code == 3
    assert "ValueError; its one restart is used up (--max-restarts)" in finish.why


def test_where_an_operator_restarts_workers_the_others_are_not_ended_with_this_one() -> None:
    play = plain(alone=False)
    play.exits(1, 3, Fault.PROGRAM, "ValueError")
    assert play.take(e.Charged(1)) == ()
    assert kinds(play.exits(0, -9)) == ["Finish"]


def test_what_looks_like_a_lost_peer_is_charged_if_all_meet_again_and_nobody_else_says_it_was_it() -> None:
    play = plain()
    assert "Charge" not in kinds(play.exits(0, 1, Fault.PEER, "connection closed"))
    play.exits(1, -9)
    told = play.form(2, "a", "b")
    assert c.Charge("a", 1, "connection closed", unless_others=True) in told
    play.exits(0, 1, Fault.PROGRAM, "ValueError")
    play.exits(1, -9)
    assert "Charge" not in kinds(play.form(3, "a", "b")), "once"


def test_what_looks_like_a_lost_peer_is_not_charged_if_one_is_gone_however_late_that_shows() -> None:
    play = plain(max_restarts=0)
    play.exits(0, 1, Fault.PEER, "connection closed")
    play.exits(1, -9)
    assert kinds(play.form(2, "a", "c")) == ["Fork"]


@pytest.mark.parametrize("killed_first", [True, False])
def test_peer_that_is_lost_in_the_same_agent_is_not_charged(killed_first: bool) -> None:
    """Its members are all there when they meet again, because the agent lives: that is no sign that nobody was lost."""
    play = keeping(3, max_restarts=0)
    ends = [(1, -9, Fault.OUTSIDE), (0, 1, Fault.PEER), (2, 1, Fault.PEER)]
    for slot, code, fault in ends if killed_first else ends[1:] + ends[:1]:
        assert "Charge" not in kinds(play.exits(slot, code, fault))
    assert "Charge" not in kinds(play.form(2, "a", "b", "c"))


def test_kills_from_outside_are_not_charged_until_there_are_too_many_in_a_row() -> None:
    play = plain(1)
    for number in range(1, MOST_OUTSIDE + 1):
        assert "Charge" not in kinds(play.exits(0, -9))
        play.form(number + 1, "a", "b")
    assert "Charge" in kinds(play.exits(0, -9))


def test_processes_that_fail_before_another_round_is_formed_are_charged_once_for_each_time_they_were_forked() -> None:
    """Nothing else tells their failures apart: the round is the same."""
    play = keeping(2, max_restarts=2)
    told = [*play.exits(0, 1, Fault.PROGRAM), *play.exits(1, 1, Fault.PROGRAM)]
    assert [i for i in told if isinstance(i, c.Charge)] == [c.Charge("a", 1, "x")]
    told = [*play.exits(1, 1, Fault.PROGRAM), *play.exits(0, 1, Fault.PROGRAM)]
    assert [i for i in told if isinstance(i, c.Charge)] == [c.Charge("a", 1, "x", earlier=1)]
    # Ends from outside are no failures, and what was forked after them follows from nothing.
    play.exits(0, -9)
    assert c.Charge("a", 1, "x", earlier=2) in play.exits(0, 1, Fault.PROGRAM)
    play.form(2, "a", "b", "c", keeps=True)
    assert c.Charge("a", 2, "x") in play.exits(0, 1, Fault.PROGRAM)


def test_an_agent_that_was_in_no_round_yet_charges_each_time_too() -> None:
    play = Play(max_restarts=1)
    play.take(e.Began(True))
    assert c.Charge("a", 0, "x") in play.exits(0, 1, Fault.PROGRAM)
    assert c.Charge("a", 0, "x", earlier=1) in play.exits(0, 1, Fault.PROGRAM)


def test_a_process_that_says_that_it_lost_a_peer_again_and_again_before_it_has_any_is_charged() -> None:
    """As one that does not reach its data: no round is ever formed in which it could show whose fault it was."""
    play = keeping(1)
    told = [kind for _ in range(MOST_OUTSIDE + 1) for kind in kinds(play.exits(0, 1, Fault.PEER, "refused"))]
    assert told.count("Charge") == 1


@pytest.mark.parametrize(("further", "charged"), [(0, True), (1, False)])
def test_worlds_that_form_and_fail_at_the_same_step_again_and_again_are_charged(further: int, charged: bool) -> None:
    """As when all ranks make the same mistake in a collective, which looks like a lost peer to each of them."""
    play = keeping(2)
    told: list[str] = []
    for number in range(2, 2 * MOST_OUTSIDE + 4):
        told += kinds(play.exits(0, exit_codes.NOT_RECOVERED))
        told += kinds(play.form(number, "a", "b", keeps=True))
        for slot in range(2):
            play.take(e.Hello(slot, play.pid(slot)))
            play.take(e.Ready(slot, play.pid(slot)))
        for slot in range(2):
            play.take(e.Trains(slot, play.pid(slot), number, 5 + further * number))
    assert ("Charge" in told) == charged


def test_process_that_had_left_its_loop_and_succeeds_is_not_waited_for_in_the_next_round() -> None:
    play = keeping(2)
    play.exits(1, -9)
    play.take(e.Hello(1, play.pid(1)))
    assert "JoinNext" in kinds(play.take(e.Ready(1, play.pid(1))))
    play.form(2, "a", "b", keeps=True)
    told = play.exits(0, 0)
    assert kinds(told) == ["Withdraw", "Signal"]
    assert kinds(play.exits(1, -9)) == ["Fork"]


def test_processes_whose_script_has_no_steps_end_one_after_another() -> None:
    play = Play(2)
    play.take(e.Began(True))
    for slot in range(2):
        play.take(e.Hello(slot, play.pid(slot)))
        play.take(e.Ready(slot, play.pid(slot)))
    play.form(1, "a", "b", keeps=True)
    assert play.exits(0, 0) == ()
    assert "Done" in kinds(play.exits(1, 0))


def test_an_agent_whose_processes_succeeded_waits_for_the_others_and_repeats_if_one_is_lost() -> None:
    play = plain(1)
    assert play.exits(0, 0) == (c.Done("a", 1), e.Timer(LINGER_SECONDS, Purpose.LINGER, 1))
    assert play.take(e.Changed(1, Growing(1, None))) == ()
    assert play.take(e.Changed(1, Broken("b is gone"))) == (e.JoinNext(1),)
    assert kinds(play.form(2, "a", "b")) == ["Fork"]
    play.exits(0, 0)
    assert play.take(e.Changed(2, Closed(FINISHED))) == (e.Finish(0, FINISHED),)


def test_who_waited_long_enough_for_the_others_goes() -> None:
    play = plain(1)
    timer = play.exits(0, 0)[1]
    assert kinds(play.take(e.Elapsed(timer))) == ["Finish"]
    assert play.take(e.Elapsed(timer)) == ()


@pytest.mark.parametrize("code", [exit_codes.FENCED, exit_codes.STORE_UNUSABLE, exit_codes.PREEMPTED])
def test_an_end_that_no_restart_can_mend_ends_the_agent_with_the_same_code(code: int) -> None:
    play = plain()
    told = play.exits(0, code, Fault.PROGRAM)
    assert told[0] == e.Signal((1,), signal.SIGTERM)
    (finish,) = play.exits(1, 0)
    assert finish.code == code


def test_a_signal_is_passed_on_and_followed_by_sigkill_when_the_time_is_over() -> None:
    play = plain(shutdown_seconds=7)
    told = play.take(e.StopRequested(signal.SIGTERM))
    assert told == (e.Signal((0, 1), signal.SIGTERM), e.Timer(7, Purpose.GRACE))
    play.exits(0, exit_codes.PREEMPTED)
    assert play.take(e.Elapsed(told[1])) == (e.Signal((1,), KILL),)
    (finish,) = play.exits(1, -9)
    assert finish.code == exit_codes.PREEMPTED


def test_no_round_and_no_prospect_of_one_ends_the_agent() -> None:
    play = Play()
    play.take(e.Began(False))
    assert play.take(e.NotFormed("timed out")) == (e.Finish(1, "timed out"),)


# --- processes that speak


def test_the_round_is_told_to_a_process_that_says_hello_and_the_job_learns_that_it_keeps_its_processes() -> None:
    play = plain(1)
    assert play.take(e.Hello(0, play.pid())) == (e.Announce((0,), round_of(1, "a", "b"), False),)
    assert play.take(e.Ready(0, play.pid())) == (c.KeepProcesses("a", 1),)


def test_survivors_keep_their_processes_and_tell_them_of_the_next_round() -> None:
    play = keeping()
    assert play.take(e.Changed(1, Broken("c is gone"))) == (e.JoinNext(1),)
    announce, timer = play.form(2, "a", "b", history=(Setback(1, "c", "SIGKILL", False),))
    assert announce == e.Announce((0,), round_of(2, "a", "b"), False)
    assert timer.purpose is Purpose.COME


def test_a_dead_process_is_replaced_while_the_others_train_on_and_its_agent_joins_when_the_new_one_is_ready() -> None:
    play = keeping()
    told = play.exits(0, -9, Fault.OUTSIDE, "SIGKILL")
    assert told == (c.Withdraw("a", 1, "SIGKILL"), e.Fork((0,), None))
    play.take(e.Hello(0, play.pid()))
    assert play.take(e.Ready(0, play.pid())) == (e.JoinNext(1),)


def test_growth_is_announced_as_a_world_that_still_works_together() -> None:
    play = keeping()
    assert play.take(e.Changed(1, Growing(1, None))) == (e.JoinNext(1),)
    assert play.form(2, "a", "b", "c", "d") == (e.Announce((0,), round_of(2, "a", "b", "c", "d"), True),)


@pytest.mark.parametrize(
    ("names", "history"),
    [
        (("a", "b", "d"), ()),  # one of those with whom it trained is not there any more
        (("a", "b", "c", "d"), (Setback(1, "c", "its process died", False),)),
        (("a", "b", "c", "d"), (Setback(2, "d", "died while it came", False),)),
    ],
)
def test_a_world_that_lost_something_is_not_announced_as_whole(names: Any, history: Any) -> None:
    play = keeping()
    play.take(e.Changed(1, Growing(1, None)))
    announce, _ = play.form(3, *names, history=history)
    assert not announce.whole


def test_a_new_agent_of_a_job_that_keeps_its_processes_joins_when_its_own_is_ready() -> None:
    play = Play()
    assert play.take(e.Began(True)) == (e.Fork((0,), None),)
    assert play.take(e.Hello(0, play.pid())) == ()
    assert play.take(e.Ready(0, play.pid())) == (e.JoinNext(0),)


def test_an_agent_that_waits_without_processes_starts_them_and_asks_again_where_those_of_the_others_stay() -> None:
    play = Play()
    assert play.take(e.Began(False)) == (e.JoinNext(0),)
    assert play.take(e.ProcessesFirst()) == (e.Fork((0,), None),)
    assert play.take(e.Hello(0, play.pid())) == ()
    assert play.take(e.Ready(0, play.pid())) == (e.JoinNext(0),)


def test_a_process_that_dies_while_its_agent_joins_is_replaced_and_the_agent_steps_out_of_the_round_it_gets() -> None:
    play = keeping()
    play.take(e.Changed(1, Broken("c is gone")))
    assert play.exits(0, -9) == (e.Fork((0,), None),)
    assert kinds(play.form(2, "a", "b")) == ["Withdraw"]
    assert play.take(e.Ready(0, play.pid())) == (e.JoinNext(2),)


def test_a_collective_that_fails_breaks_the_round_unless_it_is_over_within_a_second() -> None:
    play = keeping()
    (timer,) = play.take(e.Hurt(0, play.pid(), 1, "reset"))
    assert isinstance(timer, e.Timer)
    assert play.take(e.Elapsed(timer)) == (c.Break("a", 1, "reset"), e.JoinNext(1))
    again = keeping()
    (timer,) = again.take(e.Hurt(0, again.pid(), 1, "reset"))
    assert isinstance(timer, e.Timer)
    again.take(e.Changed(1, Broken("c is gone")))
    assert again.take(e.Elapsed(timer)) == ()


def test_a_process_that_does_not_come_into_the_round_is_replaced() -> None:
    play = keeping()
    play.take(e.Changed(1, Broken("c is gone")))
    _, timer = play.form(2, "a", "b")
    assert play.take(e.Elapsed(timer)) == (e.Signal((0,), KILL), c.Withdraw("a", 2, "a process ended"))
    assert play.exits(0, -9) == (e.Fork((0,), None),)
    on_time = keeping()
    on_time.take(e.Changed(1, Broken("c is gone")))
    _, timer = on_time.form(2, "a", "b")
    on_time.take(e.Trains(0, on_time.pid(), 2, 6))
    assert on_time.take(e.Elapsed(timer)) == ()


def test_a_process_that_has_come_and_waits_for_others_is_kept_once_more_as_long_and_then_replaced() -> None:
    play = keeping()
    play.take(e.Changed(1, Broken("c is gone")))
    _, timer = play.form(2, "a", "b")
    play.take(e.Entered(0, play.pid(), 2))
    (again,) = play.take(e.Elapsed(timer))
    assert isinstance(again, e.Timer)
    assert (again.seconds, again.purpose, again.round) == (timer.seconds, e.Purpose.COME, 2)
    assert play.take(e.Elapsed(again)) == (e.Signal((0,), KILL), c.Withdraw("a", 2, "a process ended"))


def test_who_is_taken_in_when_the_others_have_finished_is_done_too() -> None:
    play = Play()
    play.take(e.Began(True))
    play.take(e.Hello(0, play.pid()))
    play.take(e.Ready(0, play.pid()))
    play.form(3, "a", "b", "c", keeps=True)
    assert play.take(e.Changed(3, Finishing(1))) == (e.Signal((0,), KILL),)
    assert play.exits(0, -9)[0] == c.Done("a", 3)
    assert play.take(e.Changed(3, Closed(FINISHED))) == (e.Finish(0, FINISHED),)


def test_who_trains_in_the_round_ends_in_its_own_time_when_others_have_finished() -> None:
    play = keeping()
    assert play.take(e.Changed(1, Finishing(2))) == ()
    assert play.exits(0, 0)[0] == c.Done("a", 1)


def test_who_comes_when_the_job_has_finished_has_nothing_to_do() -> None:
    play = Play()
    play.take(e.Began(False))
    assert play.take(e.NotFormed("closed: finished", finished=True)) == (e.Finish(0, "closed: finished"),)


def test_of_two_processes_the_living_one_waits_for_the_new_one() -> None:
    play = keeping(2)
    assert play.exits(1, -9, why="SIGKILL") == (c.Withdraw("a", 1, "SIGKILL"), e.Fork((1,), None))
    assert play.state.slots[0].phase is SlotPhase.RUNNING
    play.take(e.Hello(1, play.pid(1)))
    assert play.take(e.Ready(1, play.pid(1))) == (e.JoinNext(1),)


# --- processes that do not go on


def test_a_process_that_hangs_is_killed_and_replaced_uncharged_unless_it_hangs_in_that_step_again_and_again() -> None:
    play = keeping()
    for times in range(1, MOST_STALLS + 1):
        told = play.take(e.Hung(0, play.pid(), "no progress", 7))
        assert told[0] == e.Signal((0,), KILL)
        assert ("Charge" in kinds(told)) == (times == MOST_STALLS)
        play.exits(0, -9)
        play.take(e.Hello(0, play.pid()))
        play.take(e.Ready(0, play.pid()))
        play.form(times + 1, "a", "b", "c")
        play.take(e.Trains(0, play.pid(), times + 1, 7))


def test_processes_that_all_wait_repeat_the_step_and_end_the_job_when_that_does_not_help() -> None:
    play = keeping()
    for times in range(1, MOST_STALLS):
        assert play.take(e.Stuck(times, 7, "nothing arrives")) == (
            c.Break("a", times, "nothing arrives"),
            e.JoinNext(times),
        )
        play.form(times + 1, "a", "b", "c")
        play.take(e.Trains(0, play.pid(), times + 1, 7))
    told = play.take(e.Stuck(MOST_STALLS, 7, "nothing arrives"))
    assert kinds(told) == ["Charge", "CloseJob", "Signal"]


def test_processes_that_all_wait_in_another_step_each_time_go_on() -> None:
    play = keeping()
    for number in range(1, 20):
        assert kinds(play.take(e.Stuck(number, number, "nothing arrives"))) == ["Break", "JoinNext"]
        play.form(number + 1, "a", "b", "c")


@pytest.mark.parametrize("alone", [True, False])
def test_script_that_is_refused_ends_the_job_however_many_restarts_are_left(alone: bool) -> None:
    play = plain(2, max_restarts=99, alone=alone)
    told = play.exits(0, 1, Fault.REFUSED, "rank 0: exit code 1: LoopError: write this")
    why = "rank 0: exit code 1: LoopError: write this (the script is refused, and not restarted)"
    assert told == ((c.CloseJob("a", why),) if alone else ()) + (e.Signal((1,), KILL),)
    assert play.exits(1, -9) == (e.Finish(1, why),)


def test_script_that_is_refused_after_the_job_has_come_to_a_step_is_restarted() -> None:
    play = keeping(max_restarts=99)
    told = play.exits(0, 1, Fault.REFUSED, "LoopError: write this")
    assert "Charge" in kinds(told)
    assert "Finish" not in kinds(told)


def test_newcomer_that_is_refused_is_restarted_because_the_others_have_trained() -> None:
    """Its own agent has seen no step of the job: the agents of earlier rounds have."""
    play = Play(max_restarts=99)
    play.take(e.Began(True))
    play.form(7, "a", "b", "c", keeps=True)
    play.take(e.Hello(0, play.pid()))
    told = play.exits(0, 1, Fault.REFUSED, "LoopError: write this")
    assert [kind for kind in kinds(told) if kind in ("Charge", "CloseJob")] == ["Charge"]


def test_newcomer_that_is_refused_before_its_first_round_is_restarted() -> None:
    play = Play(max_restarts=99)
    play.take(e.Began(True))
    told = play.exits(0, 1, Fault.REFUSED, "LoopError: write this")
    assert "CloseJob" not in kinds(told)


def test_replacement_that_is_refused_is_restarted_because_its_job_has_trained_since_step_0() -> None:
    """The job began at step 0 and has trained for hours in one round, when a process is lost."""
    play = plain(1, max_restarts=99)
    play.speak(1, step=0)
    play.exits(0, -9)
    told = play.exits(0, 1, Fault.REFUSED, "LoopError: write this")
    assert [kind for kind in kinds(told) if kind in ("Charge", "CloseJob")] == ["Charge"]


def test_script_that_is_refused_in_the_first_steps_of_a_job_that_speaks_ends_the_job() -> None:
    play = plain(1, max_restarts=99)
    play.speak(1, step=0)
    assert "CloseJob" in kinds(play.exits(0, 1, Fault.REFUSED, "LoopError: write this"))


def test_collectives_that_do_not_match_end_the_job_however_many_restarts_are_left() -> None:
    play = keeping(max_restarts=99)
    told = play.take(e.Mismatched(1, "rank 2 waits in barrier()"))
    assert told == (
        c.Charge("a", 1, "rank 2 waits in barrier()"),
        c.CloseJob("a", "rank 2 waits in barrier()"),
        e.Signal((0,), KILL),
    )
    (finish,) = play.exits(0, -9)
    assert finish == e.Finish(1, "rank 2 waits in barrier()")


def test_where_an_operator_restarts_workers_a_mismatch_ends_this_agent_alone() -> None:
    play = keeping(alone=False)
    assert kinds(play.take(e.Mismatched(1, "x"))) == ["Charge", "Signal"]


def test_what_is_found_of_a_round_that_is_over_means_nothing() -> None:
    play = keeping()
    assert play.take(e.Mismatched(0, "x")) == ()
    play.take(e.Changed(1, Broken("c is gone")))
    assert play.take(e.Stuck(1, 7, "x")) == ()


# --- any order of events


class Walk:
    """Random events that can be, judged at each step; `seed` replays it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.play = Play(self.random.randint(1, 3), max_restarts=self.random.choice([0, 2, 99]))
        self.speaks = self.random.random() < 0.7
        self.number = 0
        self.joining = False
        self.timers: list[e.Timer] = []
        self.charged: set[int] = set()
        self.finished = False

    @property
    def state(self) -> State:
        return self.play.state

    def take(self, event: e.Event) -> None:
        before = self.state
        told = self.play.take(event)
        assert not (self.finished and told), f"after Finish: {told}"
        for instruction in told:
            self.judge(before, event, instruction)

    def judge(self, before: State, event: e.Event, instruction: e.Instruction) -> None:
        match instruction:
            case e.JoinNext(after):
                assert not self.joining, "it joins twice"
                assert after == self.number
                self.joining = True
            case e.Fork(slots, round_):
                exited = {event.slot} if isinstance(event, e.Exited) else set()
                for slot in slots:
                    assert (
                        slot in exited or before.slots[slot].phase is not SlotPhase.RUNNING or before.slots[slot].killed
                    )
                assert self.state.notice is None, "it starts a process after it was asked to stop"
                if round_ is not None:
                    assert round_.number == self.number
                    assert not self.joining
            case e.Drained(slots):
                assert self.state.ending is not None
                assert all(self.state.slots[slot].ready for slot in slots)
            case e.Announce(slots, round_, _):
                assert round_.number == self.number
                assert all(self.state.slots[slot].phase is SlotPhase.RUNNING for slot in slots)
            case e.Timer():
                self.timers.append(instruction)
            case e.Finish():
                assert all(slot.phase is not SlotPhase.RUNNING for slot in self.state.slots), (
                    "it ends before its processes"
                )
                self.finished = True
            case c.Drain(round=number):
                assert number == self.number
                assert self.state.keeps
                assert not self.joining
            case (
                c.Withdraw(round=number) | c.Break(round=number) | c.Done(round=number) | c.KeepProcesses(round=number)
            ):
                assert number == self.number
            case _:
                pass

    def events(self) -> list[e.Event]:
        found: list[e.Event] = []
        for slot, place in enumerate(self.state.slots):
            if place.phase is not SlotPhase.RUNNING:
                continue
            pid = place.pid
            if place.killed:
                found.append(e.Exited(slot, pid, -9, Fault.OUTSIDE, "killed"))
                continue
            found += [
                e.Exited(slot, pid, -9, Fault.OUTSIDE, "SIGKILL"),
                e.Exited(slot, pid, 1, Fault.PROGRAM, "ValueError"),
                e.Exited(slot, pid, 1, Fault.PEER, "connection closed"),
                e.Exited(slot, pid, 0, Fault.OUTSIDE, ""),
                e.Hurt(slot, pid, self.number, "reset"),
                e.Hung(slot, pid, "no progress", 7),
                e.Stuck(self.number, 7, "nothing arrives"),
            ]
            if self.speaks:
                known = e.Ready(slot, pid) if place.speaks else e.Hello(slot, pid)
                found += [known] * 4 if not place.ready else [e.Trains(slot, pid, self.number, 3)] * 4
                found.append(e.Entered(slot, pid, self.number))
        if self.joining:
            found += [self.forms()] * 6
        elif self.number:
            found += [
                e.Changed(self.number, Broken("one is gone")),
                e.Changed(self.number, Growing(1, None)),
                e.Changed(self.number, Whole()),
                e.Changed(self.number, Finishing(1)),
                e.Changed(self.number - 1, Broken("an old one")),
            ]
            if self.state.notice is not None:
                count = self.random.randint(1, 3)
                found += [
                    e.Changed(self.number, Stopping(count, *self.random.choice(list(product(Staying, Coming)))))
                    for _ in range(8)
                ]
                found.append(e.Changed(self.number, Left()))
        if self.timers:
            found.append(e.Elapsed(self.random.choice(self.timers)))
        if self.random.random() < 0.02:
            found += [
                e.StopRequested(signal.SIGTERM),
                e.StopRequested(signal.SIGTERM, enough=True),
                e.StopRequested(signal.SIGINT),
                e.StopRequested(signal.SIGINT, enough=True),
                e.Charged(self.random.choice([None, 1, 100])),
            ]
        return found

    def forms(self) -> e.Formed:
        names = ["me", *self.random.sample(["a", "b", "c"], self.random.randint(0, 3))]
        history = tuple(Setback(self.number, n, "lost", False) for n in names if self.random.random() < 0.2)
        return e.Formed(round_of(self.number + 1, *names), False, history)

    def step(self, event: e.Event) -> None:
        if isinstance(event, e.Formed):
            self.number, self.joining = event.round.number, False
        self.take(event)

    def run(self) -> None:
        self.take(e.Began(self.speaks and self.random.random() < 0.5))
        for _ in range(80):
            choices = self.events()
            if self.finished or not choices:
                break
            self.step(self.random.choice(choices))
        self.settle()

    def settle(self) -> None:
        """No more faults: it ends, or all its processes are in the newest round."""
        for _ in range(60):
            if self.finished:
                return
            killed = [e for e in self.events() if isinstance(e, e_exited) and "killed" in e.why]
            asked = self.state.ending is not None
            if killed:
                self.step(killed[0])
            elif self.state.notice is not None and not asked:
                self.step(e.Elapsed(next(t for t in self.timers if t.purpose is Purpose.NOTICE)))
            elif asked:
                slot = next(i for i, s in enumerate(self.state.slots) if s.phase is SlotPhase.RUNNING)
                self.step(e.Exited(slot, self.play.pid(slot), -15, Fault.OUTSIDE, "SIGTERM"))
            else:
                self.speak_up()
                if self.joining:
                    self.step(replace(self.forms(), history=()))
            if self.at_rest():
                return
        raise AssertionError(f"it does not come to rest: {self.state}")

    def speak_up(self) -> None:
        for slot, place in enumerate(self.state.slots):
            if self.speaks and place.phase is SlotPhase.RUNNING and not place.killed:
                self.take(e.Hello(slot, self.play.pid(slot)))
                self.take(e.Ready(slot, self.play.pid(slot)))

    def at_rest(self) -> bool:
        state = self.state
        settled = state.round is not None and not state.over and not state.joining
        full = state.done or all(s.phase is not SlotPhase.EMPTY and not s.killed for s in state.slots)
        return (
            settled
            and full
            and (not state.keeps or state.done or all(s.ready or s.phase is SlotPhase.SUCCEEDED for s in state.slots))
        )


e_exited = e.Exited


def test_in_any_order_of_events_no_rule_is_broken_and_the_agent_comes_to_rest() -> None:
    finished = 0
    for seed in range(WALKS):
        walk = Walk(seed)
        try:
            walk.run()
        except Exception as error:
            raise AssertionError(f"Walk({seed}): {error}") from error
        finished += walk.finished
    assert 0 < finished < WALKS
