"""Collectives that do not match twice at the same place end the job; `transcripts/elastic/37_…` plays it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everstep.contract.calls import NO_MATCH
from everstep_local.plan.simulation import agents
from everstep_operator.api.conditions import Cause, FailedReason
from everstep_operator.api.status import MAX_MISMATCH, Restarts
from everstep_operator.plan.decide import mismatches
from everstep_operator.plan.decide.restart_budget import Fail, Restart, judge
from everstep_operator.plan.state.losses import Loss

SAID = NO_MATCH + "rank 1 waits in broadcast (train.py:40); rank 0 waits in all_reduce (train.py:44)"


def loss(said: str) -> Loss:
    return Loss(0, Cause.ERROR, said, exit_code=1)


def judged(
    before: str | None,
    now: str,
    *,
    follows: bool = False,
    new_steps: int = 0,
    rule: bool = False,
    reports: bool = True,
    ended_after: float | None = None,
) -> Any:
    """What a second loss comes to. `before`: the detail of the loss before the last restart."""
    world = agents.ElasticWorld()
    world.do_job("recovery.maxRestarts=5")
    if rule:
        world.do_rule("onExitCodes", "1", "Restart")
    place = mismatches.location(loss(before)) if before is not None else None
    world.status = world.status.model_copy(
        update={
            "restarts": Restarts(mismatch=place, last_step=7, incident_at=world.now),
            "progress": world.status.progress.model_copy(
                update={"step": 7 + new_steps, "updated_at": world.now if reports else None}
            ),
        }
    )
    at = world.now + timedelta(seconds=ended_after) if ended_after is not None else None
    world.do_advance("100")
    return judge(world.snapshot(), replace(loss(now), at=at), follows=follows)


def test_same_mismatch_again_ends_the_job_with_both_lines() -> None:
    found = judged(SAID, SAID.replace(")", "), the 3rd in this round", 1))
    assert isinstance(found, Fail)
    assert found.reason is FailedReason.SCRIPT_REFUSED
    assert SAID.replace(")", "), the 3rd in this round", 1) in found.message
    assert "correct the script" in found.message


def test_folder_of_the_stacks_is_no_part_of_the_place() -> None:
    one, other = (f"{SAID}; stacks in /tmp/{pod}/stacks of each agent" for pod in ("a1", "b2"))
    assert isinstance(judged(one, other), Fail)


@pytest.mark.parametrize(
    ("before", "options"),
    [
        (None, {}),
        (SAID.replace("train.py:40", "train.py:41"), {}),
        (SAID, {"new_steps": 1}),
        (SAID, {"follows": True}),
        (SAID, {"rule": True}),
        (SAID, {"reports": False}),
    ],
)
def test_another_mismatch_or_one_after_new_steps_is_restarted(before: str | None, options: dict[str, Any]) -> None:
    found = judged(before, SAID, **options)
    assert isinstance(found, Restart)
    if not options.get("follows"):
        assert found.restarts.mismatch == mismatches.location(loss(SAID))


@pytest.mark.parametrize(("seconds", "final"), [(2, False), (70, True)])
def test_worker_that_the_first_mismatch_ended_is_no_second_one_however_late_it_is_heard_of(
    seconds: int, final: bool
) -> None:
    found = judged(SAID, SAID, ended_after=seconds)
    assert isinstance(found, Fail if final else Restart)


def test_loss_of_another_kind_in_between_forgets_nothing() -> None:
    found = judged(SAID, "ValueError: bad row")
    assert isinstance(found, Restart)
    assert found.restarts.mismatch == mismatches.location(loss(SAID))


def test_loss_after_new_steps_forgets_a_mismatch_that_was_before_them() -> None:
    found = judged(SAID, "ValueError: bad row", new_steps=1)
    assert isinstance(found, Restart)
    assert found.restarts.mismatch is None


def test_longest_text_fits_the_status() -> None:
    place = mismatches.location(loss(NO_MATCH + "x" * 5000))
    assert place is not None
    assert len(place) == MAX_MISMATCH
    assert mismatches.location(loss("ValueError")) is None
