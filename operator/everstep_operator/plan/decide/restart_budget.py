"""Decides whether a job may restart after a loss, what that costs, and when.

Restart state is counters in `status.restarts`, written by the same compare-and-swap that publishes the new round: a
loss is therefore charged exactly once, however often the operator dies in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from everstep_operator.api.conditions import Cause, FailedReason
from everstep_operator.api.events import EventReason
from everstep_operator.api.recovery import Recovery, RuleAction
from everstep_operator.api.status import Restarts
from everstep_operator.plan.decide import mismatches, refusals, rejections, start_failures
from everstep_operator.plan.snapshot import Snapshot
from everstep_operator.plan.state import lost_nodes, suspects
from everstep_operator.plan.state.facts import Facts
from everstep_operator.plan.state.losses import Charge, Loss

# A machine that is lost or missing does not show whether the program can take a step.
_UNRELATED_TO_PROGRESS = frozenset(
    {
        Cause.NODE_LOST,
        Cause.POD_DELETED,
        Cause.EVICTED,
        Cause.DISRUPTION_TARGET,
        Cause.REJECTED,
        Cause.START_TIMEOUT,
        Cause.PEER_MISSING,
    }
)


@dataclass(frozen=True, slots=True)
class Fail:
    """The job ends here."""

    reason: FailedReason
    message: str
    event: EventReason = EventReason.JOB_FAILED


@dataclass(frozen=True, slots=True)
class Restart:
    """The job goes on in a new round with these counters."""

    restarts: Restarts


def judge(snapshot: Snapshot, loss: Loss, *, follows: bool = False) -> Fail | Restart:
    """Judge a loss. `follows`: the loss belongs to an incident that was counted already."""
    job, seen = snapshot.job, snapshot.progress
    before = job.status.progress
    step = seen.step if seen.step is not None else before.step
    reporting = seen.updated_at is not None or before.updated_at is not None
    if refusals.is_final(snapshot, loss) and _rule(job.spec.recovery, loss) is None:
        return Fail(FailedReason.SCRIPT_REFUSED, refusals.message(loss), EventReason.SCRIPT_REFUSED)
    location = mismatches.location(loss) if not follows and not mismatches.is_late(job.status.restarts, loss) else None
    if (
        location
        and reporting
        and mismatches.is_final(job.status.restarts, loss, step)
        and _rule(job.spec.recovery, loss) is None
    ):
        return Fail(FailedReason.SCRIPT_REFUSED, mismatches.message(loss), EventReason.SCRIPT_REFUSED)
    elsewhere = start_failures.runs_elsewhere(snapshot, loss.index, loss.pod)
    if loss.cannot_start and not elsewhere and not start_failures.has_run(snapshot):
        return _at_start(snapshot.now, job.spec.recovery, job.status.restarts, loss, follows)
    # Other workers run meanwhile. Either their steps are not known, or they do not train with the lost worker.
    alone = elsewhere and (step is None or _is_outside(snapshot, loss))
    judged = judge_by_budget(
        snapshot.now, job.spec.recovery, job.status.restarts, loss, step, reporting, follows, alone
    )
    if location and isinstance(judged, Restart):
        return Restart(judged.restarts.model_copy(update={"mismatch": location}))
    return judged


def _is_outside(snapshot: Snapshot, loss: Loss) -> bool:
    """Whether the lost pod is known not to be a member of the present round."""
    pod = next((p for p in snapshot.pods if p.name == loss.pod), None)
    world = snapshot.world
    return pod is not None and world is not None and (pod.index, pod.incarnation) not in world.members


def _at_start(now: datetime, recovery: Recovery, restarts: Restarts, loss: Loss, follows: bool) -> Fail | Restart:
    """Judge the loss of a program that cannot start and never has. A matching rule of `spec.recovery` takes
    precedence."""
    judged = judge_by_budget(now, recovery, restarts, loss, None, False, follows)
    if isinstance(judged, Fail) or judged.restarts == restarts or _rule(recovery, loss) is not None:
        return judged
    tries = restarts.start_failures + 1
    if tries >= recovery.no_progress_limit:
        return Fail(
            FailedReason.CANNOT_START,
            f"worker {loss.index}: {loss.detail}; {tries} tries ended like this, and the program has never run "
            "(spec.recovery.noProgressLimit)",
        )
    return Restart(judged.restarts.model_copy(update={"start_failures": tries}))


def judge_by_budget(
    now: datetime,
    recovery: Recovery,
    restarts: Restarts,
    loss: Loss,
    step: int | None,
    reporting: bool,
    follows: bool = False,
    alone: bool = False,
) -> Fail | Restart:
    """Judge one loss.

    `step`: the highest step completed so far; None if no process ever reported one. `reporting`: whether the script
    reports at all. Without reports nothing is known about progress, so `noProgressLimit` cannot be applied. `alone`:
    the loss is unrelated to the other workers' progress, so only the restart budget counts it.
    """
    charge = loss.charge
    match _rule(recovery, loss):
        case RuleAction.FAIL:
            return Fail(
                FailedReason.FAILED_BY_RULE, f"worker {loss.index}: {loss.detail}: spec.recovery.rules says Fail"
            )
        case RuleAction.RESTART_UNCHARGED:
            charge = Charge.INFRASTRUCTURE if charge is Charge.USER_CODE else charge
        case RuleAction.RESTART:
            charge = Charge.USER_CODE
        case None if loss.cause is Cause.STORE_UNUSABLE:
            return Fail(FailedReason.CHECKPOINT_STORE_UNUSABLE, f"worker {loss.index}: {loss.detail}")
    if follows and (charge is not Charge.USER_CODE or _is_charged(restarts)):
        return Restart(restarts)
    counted = _count(now, recovery, restarts, loss, charge, step, alone)
    if charge is Charge.USER_CODE and counted.in_window > recovery.max_restarts:
        return Fail(
            FailedReason.RESTART_BUDGET_EXHAUSTED,
            f"worker {loss.index}: {loss.detail}; {_used_up(recovery)}",
            EventReason.RESTART_BUDGET_EXHAUSTED,
        )
    if reporting and not alone and counted.without_progress >= recovery.no_progress_limit:
        return Fail(
            FailedReason.NO_PROGRESS,
            f"worker {loss.index}: {loss.detail}; lost {in_a_row(counted.without_progress)} without one new step "
            "(spec.recovery.noProgressLimit)",
        )
    return Restart(counted)


def in_a_row(count: int) -> str:
    """`once`, or `3 times in a row`."""
    return "once" if count == 1 else f"{count} times in a row"


def _used_up(recovery: Recovery) -> str:
    allowed = recovery.max_restarts
    if allowed == 0:
        return "no restart is allowed (spec.recovery.maxRestarts is 0)"
    number = "the one restart" if allowed == 1 else f"all {allowed} restarts"
    within = f"within {recovery.restart_window_seconds} s"
    return f"{number} {within} {'is' if allowed == 1 else 'are'} used up (spec.recovery.maxRestarts)"


def back_off_until(now: datetime, recovery: Recovery, restarts: Restarts) -> datetime | None:
    """The time from which missing workers may be created, if that is later than `now`. Only a charged restart and a
    rejected pod are followed by a back-off, which is exponential."""
    back_off = recovery.backoff_seconds
    starts = [rejections.back_off_until(restarts, back_off)]
    if restarts.last_at is not None and restarts.in_window > 0:
        starts.append(restarts.last_at + back_off.after(restarts.in_window))
    return max((start for start in starts if start is not None and now < start), default=None)


def counted_by_node(facts: Facts, restarts: Restarts, lost: tuple[Loss, ...]) -> Restarts:
    """The counters with what these losses say about the nodes on which they happened."""
    now = facts.snapshot.now
    restarts = lost_nodes.counted(now, rejections.counted(now, restarts, lost), lost)
    return suspects.counted(now, restarts, suspects.of_losses(lost, facts.current))


def _is_charged(restarts: Restarts) -> bool:
    """Whether the incident was charged already: one mistake of the program may fail all of its workers."""
    return restarts.last_at is not None and (restarts.incident_at is None or restarts.last_at >= restarts.incident_at)


def _rule(recovery: Recovery, loss: Loss) -> RuleAction | None:
    for rule in recovery.rules:
        if loss.exit_code in (rule.on_exit_codes or ()) or loss.cause in (rule.on_reasons or ()):
            return rule.action
    return None


def _count(
    now: datetime, recovery: Recovery, old: Restarts, loss: Loss, charge: Charge, step: int | None, alone: bool
) -> Restarts:
    progressed = step is not None and (old.last_step is None or step > old.last_step)
    without = 0 if progressed else old.without_progress
    if loss.cause not in _UNRELATED_TO_PROGRESS and not progressed and not alone:
        without += 1
    charged = charge is Charge.USER_CODE
    window_over = old.window_started_at is None or now - old.window_started_at > timedelta(
        seconds=recovery.restart_window_seconds
    )
    changed: dict[str, Any] = {
        "user_code": old.user_code + charged,
        "infrastructure": old.infrastructure + (charge is Charge.INFRASTRUCTURE),
        "preemption": old.preemption + (charge is Charge.PREEMPTION),
        "window_started_at": now if charged and window_over else old.window_started_at,
        "in_window": (0 if window_over else old.in_window) + 1 if charged else old.in_window,
        "without_progress": without,
        "start_timeouts": old.start_timeouts + 1 if loss.cause is Cause.START_TIMEOUT else 0,
        "mismatch": None if progressed else old.mismatch,
        "last_step": step if step is not None else old.last_step,
        "last_at": now if charged else old.last_at,
    }
    return Restarts(**(dict(old) | changed))  # not `model_copy`, which computes no total
