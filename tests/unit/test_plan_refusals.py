"""A script that is refused in its first steps ends its job at once; a job that has trained keeps its budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everstep_local.plan.simulation import cluster as plan_world
from everstep_operator.api.conditions import Cause, ConditionStatus, ConditionType
from everstep_operator.api.status import Restarts
from everstep_operator.plan.decide import restart_budget
from everstep_operator.plan.snapshot import Exit, PodPhase, ReportedProgress, Snapshot, WorkerPod
from everstep_operator.plan.state.losses import MAX_ERROR, MAX_LOCATION, Loss, ScriptRefusal, losses_among

SAID = "LoopError: `ema` moves and is not tracked: write run.track(ema=ema) before the loop"


@pytest.fixture
def world() -> Any:
    return plan_world.World()


def record(**fields: object) -> str:
    written = {"everstep": 1, "rank": "0", "exit_code": 1, "error": SAID, "lines": []}
    return json.dumps({**written, "refused_after": 0, "line": "train.py:31", **fields})


def loss_of(world: Any, message: str, code: int = 1, reason: str = "Error") -> Loss:
    snapshot = world.snapshot()
    exit_ = Exit(code, reason, message, snapshot.now)
    pod = WorkerPod("digits-w0-0", "u", 0, 0, 1, PodPhase.FAILED, node="n1", exit=exit_)
    [loss] = losses_among(snapshot, {0: pod}, {0: True})
    return loss


def judged(world: Any, loss: Loss) -> restart_budget.Fail | restart_budget.Restart:
    return restart_budget.judge(world.snapshot(), loss)


def test_refusal_ends_the_job_with_its_words_its_line_and_what_to_do(world: Any) -> None:
    for line in ("settle", "ready 0 1"):
        world.run(line)
    world.do_fail("1", "1", record())
    world.do_reconcile()
    status = world.status
    said = status.failure.message
    assert said.startswith(f"ScriptRefused: worker 1: {SAID} (at train.py:31); ")
    assert said.endswith("correct the script and create the job again")
    assert status.restarts == Restarts()
    (failed,) = (c for c in status.conditions if c.type is ConditionType.FAILED)
    assert (failed.status, failed.reason, failed.message) == (ConditionStatus.TRUE, "ScriptRefused", said)


def test_line_that_the_refusal_names_itself_is_not_said_twice(world: Any) -> None:
    loss = loss_of(world, record(error="LoopError: dist.barrier() (train.py:31) is between two steps"))
    assert judged(world, loss).message.count("train.py:31") == 1  # type: ignore[union-attr]


def test_longest_refusal_leaves_room_for_what_to_do(world: Any) -> None:
    world.do_settle()
    world.do_fail("0", "1", record(error="LoopError: " + "w" * 3000, line="l" * 3000))
    world.do_reconcile()
    assert world.status.failure.message.endswith("create the job again")


@pytest.mark.parametrize("steps", [None, "1", 1.0, -1, 5, True, [], {}, 10**30])
def test_record_that_does_not_tell_of_first_steps_is_judged_as_before(world: Any, steps: object) -> None:
    loss = loss_of(world, record(refused_after=steps))
    assert (loss.refusal, loss.cause, loss.detail) == (None, Cause.ERROR, SAID)
    assert isinstance(judged(world, loss), restart_budget.Restart)


@pytest.mark.parametrize("steps", [0, 4])
def test_refusal_whose_words_are_those_of_a_lost_peer_is_one(world: Any, steps: int) -> None:
    loss = loss_of(
        world, record(refused_after=steps, error="LoopError: Connection reset by peer is caught: re-raise it")
    )
    assert (loss.cause, loss.refusal) == (Cause.ERROR, ScriptRefusal("train.py:31"))


def test_line_of_a_record_is_cut_and_shows_no_secret(world: Any) -> None:
    for line, shown in (
        (None, "None"),
        ("a\nb\tc", "a b c"),
        ("x" * 3000, "x" * MAX_LOCATION),
        ("password=hunter2hunter2", "password=[redacted]"),
        ("\ud800.py:1", "?.py:1"),
    ):
        assert loss_of(world, record(line=line)).refusal == ScriptRefusal(shown)
    assert len(loss_of(world, record(error="w" * 5000)).detail) == MAX_ERROR


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        (record(exit_code=84), 84, "Error"),
        (record(exit_code=137), 137, "OOMKilled"),
        (record(), 137, "OOMKilled"),
        (record(exit_code=3), 3, "Error"),
    ],
)
def test_other_end_of_a_process_that_was_refused_is_judged_by_itself(
    world: Any, message: str, code: int, reason: str
) -> None:
    assert loss_of(world, message, code, reason).refusal is None


def reports_step(step: int) -> Callable[[Any], None]:
    def story(world: Any) -> None:
        world.progress = ReportedProgress(step=step, updated_at=world.now)

    return story


def has_committed(world: Any) -> None:
    world.progress = ReportedProgress(committed_step=1000, updated_at=world.now)


def starts_from_a_commit(world: Any) -> None:
    world.progress = ReportedProgress(restored_step=1000, updated_at=world.now)


def only_starts(world: Any) -> None:
    world.do_advance("1801")  # to load a large model takes long, and the process says that it is there
    world.progress = ReportedProgress(updated_at=world.now)


def says_nothing(world: Any) -> None:
    world.do_advance("30")


def says_nothing_for_long(world: Any) -> None:
    world.do_advance("1801")


@pytest.mark.parametrize(
    ("story", "ends"),
    [
        (only_starts, True),
        (says_nothing, True),
        (reports_step(4), True),
        (reports_step(5), False),
        (has_committed, False),
        (starts_from_a_commit, False),
        (says_nothing_for_long, False),
    ],
)
def test_job_that_may_have_trained_is_not_ended_by_a_refusal(
    world: Any, story: Callable[[Any], None], ends: bool
) -> None:
    for line in ("settle", "ready 0 1", "reconcile"):
        world.run(line)
    story(world)
    assert isinstance(judged(world, loss_of(world, record())), restart_budget.Fail) is ends


def test_operator_that_was_restarted_knows_from_the_status_that_the_job_has_trained(world: Any) -> None:
    for line in ("settle", "ready 0 1", "reconcile"):
        world.run(line)
    world.progress = ReportedProgress(step=1000, updated_at=world.now)
    world.do_reconcile()
    world.progress = ReportedProgress()
    assert isinstance(judged(world, loss_of(world, record())), restart_budget.Restart)


def test_rule_of_the_user_goes_before(world: Any) -> None:
    world.do_rule("onExitCodes", "1", "RestartUncharged")
    assert isinstance(judged(world, loss_of(world, record())), restart_budget.Restart)


def test_refusal_ends_the_job_however_soon_after_another_loss(world: Any) -> None:
    snapshot: Snapshot = world.snapshot()
    counted = Restarts(infrastructure=1, incident_at=snapshot.now)
    status = snapshot.job.status.model_copy(update={"restarts": counted})
    snapshot = replace(
        snapshot, job=replace(snapshot.job, status=status), progress=ReportedProgress(updated_at=snapshot.now)
    )
    assert isinstance(restart_budget.judge(snapshot, loss_of(world, record()), follows=True), restart_budget.Fail)


def test_worker_that_is_refused_alone_while_another_trains_ends_nothing(world: Any) -> None:
    """Its image may be another one, and its reports may be late."""
    world.do_settle()
    name = world.current(0)
    world.do_ready("1")
    world.do_advance("30")
    exit_ = Exit(1, "Error", record(), world.now - timedelta(seconds=20))
    world.change(name, phase=PodPhase.FAILED, exit=exit_)
    snapshot = world.snapshot()
    [loss] = losses_among(snapshot, {p.index: p for p in snapshot.pods}, {0: True})
    assert loss.refusal is not None
    assert isinstance(restart_budget.judge(snapshot, loss), restart_budget.Restart)
