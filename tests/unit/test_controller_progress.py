"""What the workers' reports are folded into, and what of an earlier round or another clock never gets in."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from everstep.contract.messages import Phase, Report
from everstep_operator.api.status import Status
from everstep_operator.controller.job_seconds import Standing
from everstep_operator.controller.progress import JobProgress
from everstep_operator.plan.snapshot import ReportedPeak, ReportedProgress

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def report(phase: Phase, rank: int = 0, **fields: Any) -> Report:
    return Report(**{"phase": phase, "rank": rank, "world_size": 2, "at": 0.0, "round": 1, **fields})


def fresh(**status: Any) -> JobProgress:
    return JobProgress(Status.model_validate({"world": {"round": 1, "size": 2}, **status}), START)


def test_recovery_times_are_taken_when_the_last_rank_has_come_so_far() -> None:
    progress = fresh()
    progress.published(2, at(1))
    moments = [
        (2, Phase.START, 0), (3, Phase.START, 1), (4, Phase.RESTORE, 1), (6, Phase.RESTORE, 0),
        (7, Phase.TRAIN, 1), (9, Phase.TRAIN, 0), (20, Phase.TRAIN, 1), (21, Phase.TRAIN, 0),
    ]  # fmt: skip
    for second, phase, rank in moments:
        progress.accept(report(phase, rank, round=2, step=5, restored_step=4, restore_seconds=0.5 + rank), at(second))
    seen = progress.snapshot()
    assert (seen.started_at, seen.restored_at) == (at(3), at(6))
    assert (seen.trained_at, seen.first_step_at) == (at(7), at(9))
    assert (seen.restored_step, seen.restore_seconds) == (4, 1.5)  # the slowest rank's


def test_first_steps_are_acted_on_at_once_and_later_ones_are_not() -> None:
    progress = fresh()
    assert not progress.accept(report(Phase.START), at(1))
    assert progress.accept(report(Phase.TRAIN, 0, step=1), at(2))
    assert progress.accept(report(Phase.TRAIN, 1, step=1), at(3))
    assert not progress.accept(report(Phase.TRAIN, 0, step=2), at(4))
    assert progress.accept(report(Phase.DONE, 0, step=9), at(5))


def test_report_of_an_earlier_round_changes_nothing() -> None:
    progress = fresh()
    progress.published(3, at(1))
    before = progress.snapshot()
    assert not progress.accept(report(Phase.TRAIN, round=2, step=99, metrics={"loss": 1.0}), at(2))
    assert progress.snapshot() == before


def test_commit_of_workers_that_a_new_round_stops_is_told_until_that_round_reports() -> None:
    """A suspend publishes a round of no workers; those that were told to stop then commit their last step."""
    progress = fresh()
    progress.accept(report(Phase.TRAIN, step=371, committed_step=350, committed_at=1.0), at(1))
    progress.published(2, at(2))
    assert progress.accept(report(Phase.SAVE, step=373, committed_step=373, committed_at=2.0), at(3))
    seen = progress.snapshot()
    assert (seen.round, seen.step, seen.committed_step) == (2, 373, 373)
    assert not progress.accept(report(Phase.SAVE, step=373, committed_step=350), at(4)), "an older one is no news"
    progress.published(3, at(5))
    progress.accept(report(Phase.START, round=3), at(6))
    assert not progress.accept(report(Phase.SAVE, step=380, committed_step=380), at(7))
    assert progress.snapshot().committed_step == 373


def test_report_of_a_later_round_opens_it_for_a_replica_that_did_not_publish_it() -> None:
    progress = fresh()
    progress.accept(report(Phase.TRAIN, 0, step=1), at(1))
    progress.accept(report(Phase.TRAIN, 0, round=4, step=2), at(2))
    seen = progress.snapshot()
    assert (seen.round, seen.trained_at, seen.first_step_at) == (4, at(2), None)


def test_publishing_a_round_again_or_an_older_one_does_not_forget_reports() -> None:
    progress = fresh()
    progress.published(2, at(1))
    progress.accept(report(Phase.START, round=2), at(2))
    before = progress.snapshot()
    progress.published(2, at(3))
    progress.published(1, at(3))
    assert progress.snapshot() == before


def test_steps_taken_again_after_a_loss_are_not_productive() -> None:
    progress = fresh(startTime=START)
    progress.seconds.planned(START, Standing.START)
    progress.accept(report(Phase.TRAIN, step=10), at(1))
    progress.accept(report(Phase.TRAIN, step=20), at(6))
    assert progress.snapshot().productive_seconds == 5.0
    progress.published(2, at(7))
    progress.accept(report(Phase.RESTORE, round=2, restored_step=16), at(7))
    progress.accept(report(Phase.TRAIN, round=2, step=18), at(9))
    assert (progress.snapshot().step, progress.snapshot().productive_seconds) == (20, 5.0)
    progress.accept(report(Phase.TRAIN, round=2, step=22), at(11))
    assert (progress.snapshot().step, progress.snapshot().productive_seconds) == (22, 6.0)


def test_steps_of_an_earlier_jobs_checkpoints_are_not_its_own() -> None:
    progress = fresh()
    progress.seconds.planned(START, Standing.START)
    for rank in range(2):
        progress.accept(report(Phase.RESTORE, rank, restored_step=1000), at(1))
    progress.accept(report(Phase.TRAIN, step=1010), at(6))
    assert (progress.snapshot().step, progress.snapshot().productive_seconds) == (1010, 5.0)


def test_steps_that_came_before_a_loss_was_noticed_are_not_those_before_it() -> None:
    """The agents were in their next round first. The steps before it are known, so that none looks repeated."""
    progress = fresh()
    progress.accept(report(Phase.TRAIN, step=40, round=1), at(1))
    progress.accept(report(Phase.TRAIN, step=41, round=2), at(2))
    progress.accept(report(Phase.TRAIN, step=55, round=2), at(3))
    progress.lost(at(1.5))
    seen = progress.snapshot()
    assert (seen.step_before, seen.resumed_step, seen.step, seen.lost_at) == (40, 40, 55, at(1.5))


def test_operator_that_restarts_goes_on_from_what_the_status_remembers() -> None:
    seconds = {"productive": 90, "form": 10}
    progress = fresh(startTime=at(-300), progress={"step": 40}, stateSeconds=seconds, goodputPercent=90)
    progress.accept(report(Phase.TRAIN, step=40), at(1))
    assert (progress.snapshot().step, progress.snapshot().productive_seconds) == (40, 90.0)


def test_failed_save_is_remembered_until_one_succeeds_and_each_change_is_acted_on() -> None:
    progress = fresh()
    assert progress.accept(report(Phase.SAVE_FAILED, checkpoint_error="503"), at(1))
    assert not progress.accept(report(Phase.SAVE_FAILED, checkpoint_error="403"), at(2))
    assert progress.snapshot().checkpoint_error == "403"
    assert progress.accept(report(Phase.SAVE, committed_step=7, committed_at=START.timestamp()), at(3))
    seen = progress.snapshot()
    assert (seen.checkpoint_error, seen.committed_step, seen.committed_at) == (None, 7, START)
    assert not progress.accept(report(Phase.SAVE, committed_step=8), at(4))


def test_commit_that_was_stepped_over_is_told_until_the_next_commit() -> None:
    progress = JobProgress(Status(), START)
    text = "log record 7 is stepped over: data/x/00001.safetensors: chunk 0 has another checksum"
    assert progress.accept(report(Phase.RESTORE, restored_step=40, checkpoint_error=text), at(1))
    assert not progress.accept(report(Phase.RESTORE, 1, restored_step=40, checkpoint_error=text), at(1))
    assert progress.snapshot().checkpoint_damaged == text
    assert progress.accept(report(Phase.SAVE, committed_step=60, committed_at=START.timestamp()), at(3))
    assert progress.snapshot().checkpoint_damaged is None


def test_script_without_a_checkpointer_is_restored_when_it_has_started() -> None:
    progress = fresh()
    for rank in (0, 1):
        progress.accept(report(Phase.START, rank), at(1 + rank))
    for rank in (0, 1):
        progress.accept(report(Phase.TRAIN, rank, step=1), at(5 + rank))
    assert progress.snapshot().restored_at == at(2)


def test_clock_of_a_worker_is_never_taken_for_the_operators() -> None:
    progress = fresh()
    progress.accept(report(Phase.TRAIN, step=1, at=4e9, committed_at=1e300), at(5))
    assert progress.snapshot().updated_at == at(5)
    progress.accept(report(Phase.SAVE, committed_step=1, committed_at=1e300), at(6))
    committed = progress.snapshot().committed_at
    assert committed is not None
    assert committed.year < 2100


def test_a_slow_rank_is_acted_on_at_once_and_is_forgotten_with_its_round() -> None:
    progress = fresh()
    for rank in (0, 1):
        progress.accept(report(Phase.TRAIN, rank, step=1), at(1))
    assert progress.accept(report(Phase.TRAIN, step=9, straggler="rank 1 is slow"), at(2))
    assert not progress.accept(report(Phase.TRAIN, step=10, straggler="rank 1 is slow"), at(3))
    assert not progress.accept(report(Phase.TRAIN, 1, step=10), at(3)), "rank 0 speaks for all"
    assert progress.snapshot().straggler == "rank 1 is slow"
    assert progress.accept(report(Phase.TRAIN, step=80), at(4))
    assert progress.snapshot().straggler is None
    progress.accept(report(Phase.TRAIN, step=90, straggler="rank 1 is slow"), at(5))
    progress.accept(report(Phase.START, round=2), at(6))
    assert progress.snapshot().straggler is None


def test_rehearsal_of_the_program_that_rank_0_reports_is_that_of_the_round() -> None:
    progress = fresh()
    progress.accept(report(Phase.TRAIN, 1, step=1, rehearsed="another"), at(1))
    assert progress.snapshot().rehearsed is None
    progress.accept(report(Phase.TRAIN, step=1, rehearsed="2026-11-29, 3 ranks, 40 steps"), at(1))
    assert progress.snapshot().rehearsed == "2026-11-29, 3 ranks, 40 steps"
    progress.accept(report(Phase.START, round=2), at(2))
    assert progress.snapshot().rehearsed is None


def test_peak_memory_is_that_of_the_rank_that_held_the_most_and_is_forgotten_with_its_round() -> None:
    progress = fresh()
    progress.accept(report(Phase.TRAIN, 0, step=1, peak_memory=500), at(1))
    progress.accept(report(Phase.TRAIN, 1, step=1, peak_memory=700, peak_device_memory=0), at(1))
    progress.accept(report(Phase.TRAIN, 0, step=2, peak_memory=600, peak_device_memory=90), at(2))
    assert progress.snapshot().memory == ReportedPeak(host=700, rank=1, device=90, device_rank=0)
    assert progress.peak_memory == progress.snapshot().memory
    progress.accept(report(Phase.START, round=2), at(3))
    assert progress.snapshot().memory is None


phases = st.sampled_from(Phase)
whole = st.one_of(st.none(), st.integers(0, 2**63 - 1))
real = st.one_of(st.none(), st.floats(0, 1e308))
reports = st.builds(
    Report, phase=phases, rank=st.integers(0, 2**63 - 1), world_size=st.integers(0, 4), at=st.floats(0, 1e308),
    round=st.integers(0, 4), step=whole, total_steps=whole, epoch=whole, step_seconds=real, restored_step=whole,
    restore_seconds=real, committed_step=whole, committed_at=real, checkpoint_error=st.one_of(st.none(), st.text()),
    straggler=st.one_of(st.none(), st.text()), rehearsed=st.one_of(st.none(), st.text()),
    metrics=st.dictionaries(st.text(max_size=5), st.floats(), max_size=3),
    peak_memory=whole, peak_device_memory=whole,
)  # fmt: skip


@given(st.lists(st.one_of(reports, st.integers(0, 4)), max_size=15))
def test_any_sequence_of_reports_keeps_rounds_and_steps_growing(events: list[Report | int]) -> None:
    progress = fresh()
    before = progress.snapshot()
    for second, event in enumerate(events):
        if isinstance(event, int):
            progress.published(event, at(second))
        else:
            progress.accept(event, at(second))
        seen = progress.snapshot()
        assert isinstance(seen, ReportedProgress)
        assert seen.round >= before.round
        assert (seen.step or 0) >= (before.step or 0)
        assert seen.productive_seconds >= before.productive_seconds
        assert seen.trained_at is not None or seen.first_step_at is None
        before = seen


def test_absurd_round_of_one_pod_silences_the_others_for_half_a_minute_only() -> None:
    """With etcd only the agents know their rounds: a pod's word is all there is."""
    progress = fresh()
    progress.accept(report(Phase.TRAIN, step=1, round=3), at(0), "pod-0")
    progress.accept(report(Phase.START, 1, round=2**53 - 1), at(1), "pod-1")
    progress.accept(report(Phase.TRAIN, step=2, round=3), at(2), "pod-0")
    assert progress.snapshot().step == 1
    progress.accept(report(Phase.TRAIN, step=40, round=3), at(40), "pod-0")
    seen = progress.snapshot()
    assert (seen.round, seen.step) == (3, 40)


def test_late_report_of_an_older_round_is_ignored_when_others_speak_of_the_newer_one() -> None:
    progress = fresh()
    progress.accept(report(Phase.START, 0, round=4), at(0), "pod-0")
    progress.accept(report(Phase.START, 1, round=4), at(1), "pod-1")
    progress.accept(report(Phase.TRAIN, step=9, round=3), at(60), "pod-2")
    assert (progress.snapshot().round, progress.snapshot().step) == (4, None)


def test_skipped_save_is_counted_and_is_no_failure() -> None:
    progress = fresh(checkpoint={"skippedSaves": 2, "healthy": True})
    assert not progress.accept(report(Phase.SAVE_SKIPPED), at(1))
    seen = progress.snapshot()
    assert (seen.skipped_saves, seen.checkpoint_error) == (3, None)


def test_round_resumes_before_the_lowest_first_step_of_its_ranks() -> None:
    progress = fresh()
    progress.accept(report(Phase.TRAIN, 0, step=90), at(1))
    progress.accept(report(Phase.TRAIN, 1, round=2, step=93), at(2))  # told of late: it has gone on
    progress.accept(report(Phase.TRAIN, 0, round=2, step=91), at(3))
    progress.accept(report(Phase.TRAIN, 0, round=2, step=120), at(4))
    assert progress.snapshot().resumed_step == 90


def test_new_leader_that_hears_of_a_round_in_the_middle_does_not_say_where_it_resumed() -> None:
    progress = fresh()
    progress.accept(report(Phase.TRAIN, 0, round=7, step=500), at(1))
    assert progress.snapshot().resumed_step is None
