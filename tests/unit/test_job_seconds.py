"""The seconds of a job by what it did: they add up to its active life, and never fall."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep_operator.api.status import Status
from everstep_operator.controller.figures import state_seconds
from everstep_operator.controller.job_seconds import JobSeconds, Noticed, Standing, State
from everstep_operator.controller.progress import JobProgress

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def nonzero(seconds: JobSeconds, now: float) -> dict[str, float]:
    return {str(state): value for state, value in seconds.seconds(at(now)).items() if value}


def training() -> JobSeconds:
    """A job that has waited for 10 s, formed its world for 5 s, read its state for 3 s, and trained 10 steps in 20."""
    seconds = JobSeconds({}, 0.0, START)
    seconds.planned(at(0), Standing.WAIT)
    seconds.planned(at(10), Standing.FORM)
    seconds.planned(at(12), Standing.START)
    seconds.restored(at(18), 3.0)
    seconds.trained(at(38), 10, 10)
    return seconds


def test_loss_with_a_known_fault_and_what_follows() -> None:
    seconds = training()
    assert nonzero(seconds, 39) == {"wait": 10, "form": 5, "restore": 3, "productive": 20}
    assert seconds.pending(at(39)) == 1
    seconds.planned(at(50), Standing.WAIT, Noticed(at(50), at(42)), changed=True)
    assert nonzero(seconds, 50) == {"wait": 10, "form": 5, "restore": 3, "productive": 24, "detect": 8}
    seconds.planned(at(60), Standing.FORM)
    seconds.planned(at(61), Standing.START)
    seconds.restored(at(70), 2.0)
    seconds.trained(at(80), 8, 2)  # six of them had been taken before
    seconds.trained(at(81), 1, 1)
    expected = {"wait": 20, "form": 13, "restore": 5, "productive": 27.5, "detect": 8, "replay": 7.5}
    assert nonzero(seconds, 81) == pytest.approx(expected)


def test_time_since_the_last_report_is_detect_if_the_fault_has_no_time() -> None:
    seconds = training()
    seconds.planned(at(45), Standing.FORM)  # why, is not known yet
    assert nonzero(seconds, 46)["form"] == 5
    seconds.planned(at(47), Standing.FORM, Noticed(at(47), None), changed=True)
    assert nonzero(seconds, 47)["detect"] == 9


def test_reports_may_come_before_the_pass_that_sees_their_round() -> None:
    seconds = training()
    seconds.planned(at(40), Standing.FORM, Noticed(at(40), at(39)), changed=True)
    seconds.restored(at(50), 4.0)
    seconds.planned(at(50.2), Standing.START)
    seconds.trained(at(52), 1, 0)
    assert nonzero(seconds, 52) == pytest.approx(
        {"wait": 10, "form": 11, "restore": 7, "productive": 21, "detect": 1, "replay": 2}
    )


def test_round_that_agents_formed_alone_is_form_from_the_last_report() -> None:
    seconds = training()
    seconds.new_round()
    seconds.trained(at(48), 1, 1)
    seconds.trained(at(50), 1, 1)
    assert nonzero(seconds, 50) == {"wait": 10, "form": 15, "restore": 3, "productive": 22}


def test_suspended_time_is_nothing() -> None:
    seconds = training()
    seconds.planned(at(40), Standing.IDLE, changed=True)
    before = nonzero(seconds, 1000)
    seconds.planned(at(1000), Standing.WAIT, changed=True)
    assert sum(before.values()) == 40
    assert nonzero(seconds, 1005) == {**before, "wait": 15}


def test_script_that_reports_nothing_is_unknown_and_not_productive() -> None:
    seconds = JobSeconds({}, 0.0, START)
    seconds.planned(at(0), Standing.WAIT)
    seconds.planned(at(10), Standing.START)
    assert nonzero(seconds, 69) == {"wait": 10}
    assert nonzero(seconds, 100) == {"wait": 10, "unknown": 90}
    seconds.planned(at(110), Standing.WAIT, Noticed(at(110), None), changed=True)
    assert nonzero(seconds, 112) == {"wait": 12, "unknown": 100}


def test_process_that_has_reported_its_start_is_not_silent_while_it_reads_a_large_state() -> None:
    seconds = JobSeconds({}, 0.0, START)
    seconds.planned(at(0), Standing.WAIT)
    seconds.planned(at(10), Standing.START)
    seconds.started()
    assert nonzero(seconds, 300) == {"wait": 10}
    seconds.restored(at(310), 280.0)
    assert nonzero(seconds, 310) == {"wait": 10, "form": 20, "restore": 280}


def test_start_that_is_reported_late_ends_the_silence() -> None:
    seconds = JobSeconds({}, 0.0, START)
    seconds.planned(at(0), Standing.START)
    assert nonzero(seconds, 100) == {"unknown": 100}
    seconds.started()  # importing took long
    seconds.restored(at(160), 20.0)
    assert nonzero(seconds, 160) == {"unknown": 100, "form": 40, "restore": 20}


@pytest.mark.parametrize("leaders", [1, 2])
def test_life_before_the_seconds_were_kept_is_in_no_state_that_a_leader_happens_to_find(leaders: int) -> None:
    older = Status(start_time=at(-1000), earlier_active_seconds=500)  # as the operator before this one wrote it
    seconds = JobProgress(older, START).seconds
    seconds.planned(at(0), Standing.WAIT)
    assert nonzero(seconds, 10) == {"unknown": 1500, "wait": 10}
    for _ in range(leaders):
        stored = older.model_copy(update={"state_seconds": state_seconds(seconds.seconds(at(10)))})
        seconds = JobProgress(stored, at(20)).seconds
        seconds.planned(at(20), Standing.FORM)
    assert nonzero(seconds, 20)["unknown"] == 1500


@pytest.mark.parametrize(
    ("found", "state"),
    [(Standing.WAIT, State.WAIT), (Standing.FORM, State.FORM), (Standing.TRAIN, State.PRODUCTIVE)],
)
def test_new_leader_goes_on_and_finds_what_the_gap_was(found: Standing, state: State) -> None:
    seconds = JobSeconds({State.PRODUCTIVE: 50.0, State.WAIT: 20.0}, 90.0, START)
    seconds.planned(at(0), found)
    if found is Standing.TRAIN:
        seconds.trained(at(2), 1, 1)
    after = seconds.seconds(at(2))
    assert after[state] == {State.PRODUCTIVE: 50.0, State.WAIT: 20.0}.get(state, 0.0) + 22
    assert sum(after.values()) == 92


_STANDINGS = st.sampled_from([Standing.IDLE, Standing.WAIT, Standing.FORM, Standing.START])
_MOVES = st.one_of(
    st.tuples(st.just("pass"), _STANDINGS, st.booleans()),
    st.tuples(st.just("loss"), st.sampled_from([Standing.WAIT, Standing.FORM, Standing.START]), st.floats(-5, 500)),
    st.tuples(st.just("restored"), st.floats(0, 100), st.none()),
    st.tuples(st.just("trained"), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("started"), st.none(), st.none()),
    st.tuples(st.just("round"), st.none(), st.none()),
    st.tuples(st.just("scrape"), st.none(), st.none()),
    st.tuples(st.just("leader"), _STANDINGS, st.none()),
)


@given(st.lists(st.tuples(st.floats(0, 300), _MOVES), max_size=60))
@settings(deadline=None)
def test_in_any_history_no_counter_falls_and_all_add_up_to_the_active_time(history: list[tuple[float, tuple]]) -> None:  # type: ignore[type-arg]
    now, active, idle = 0.0, 0.0, False
    seconds = JobSeconds({}, 0.0, START)
    seconds.planned(at(0), Standing.WAIT)
    for wait, (what, first, second) in history:
        now += wait
        active += 0.0 if idle else wait
        before = seconds.seconds(at(now)) if what == "scrape" else dict(seconds._seconds)
        match what:
            case "pass":
                seconds.planned(at(now), first, changed=second)
                idle = first is Standing.IDLE
            case "loss" if not idle:
                fault = None if second < 0 else at(now - second)
                seconds.planned(at(now), first, Noticed(at(now), fault), changed=True)
            case "restored":
                seconds.restored(at(now), first)
            case "trained":
                seconds.trained(at(now), first, min(first, second))
            case "started":
                seconds.started()
            case "round":
                seconds.new_round()
            case "leader":
                found = Standing.IDLE if idle else first
                idle = found is Standing.IDLE
                stored = {state: float(int(value)) for state, value in seconds.seconds(at(now)).items()}
                kept = sum(stored.values())
                seconds = JobSeconds(stored, active, at(now))
                before = stored
                if idle:  # what was cut off is lost with the leader
                    active = kept
                seconds.planned(at(now), found)
        after = seconds.seconds(at(now))
        assert all(after[state] >= before[state] for state in State)
        assert sum(after.values()) + seconds.pending(at(now)) == pytest.approx(active, rel=0.01, abs=1e-3)
