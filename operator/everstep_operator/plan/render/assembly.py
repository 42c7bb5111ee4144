"""Builds a plan from a decision: the whole status, the actions in stages, the events, and when to plan again."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from everstep_operator.api.conditions import Cause, ConditionStatus, ConditionType, ReadyReason, Rung, Suspicion
from everstep_operator.api.events import EventReason
from everstep_operator.api.status import RecoveryRecord, Restarts, Status
from everstep_operator.plan.actions import CreatePodGroup
from everstep_operator.plan.decide.decision import (
    Complete,
    Decision,
    Failed,
    Keep,
    Publish,
    RecoveryStart,
    Repaired,
    Wait,
)
from everstep_operator.plan.outcome import Plan, Requeue
from everstep_operator.plan.render import (
    converge,
    disruption_budget,
    finished_job,
    job_events,
    job_status,
    network_policy,
    pod_group,
    ready_condition,
    recovery_record,
    waits,
    workloads,
    world_status,
)
from everstep_operator.plan.render.converge import Convergence
from everstep_operator.plan.stages import Stage, StageName, staged
from everstep_operator.plan.state import facts as state
from everstep_operator.plan.state import roster, suspects
from everstep_operator.plan.state.facts import Facts
from everstep_operator.plan.state.suspects import Accusation


def render_plan(facts: Facts, decision: Decision) -> Plan:
    match decision:
        case Complete(message):
            return finished_job.complete(facts.snapshot, message)
        case Failed():
            return finished_job.fail(facts.snapshot, decision)
        case Publish():
            return _publish(state.with_roster(facts, decision.roster), decision, facts.roster.wanted)
        case Wait(after, message):
            observed = _status(facts)
            status_events = job_events.of_status(facts.snapshot, observed)
            return Plan(observed, (), status_events, Requeue(after, message), reason=message)
        case Keep():
            return _keep(facts)
        case Repaired():
            kept = _keep(facts, decision)
            return replace(kept, events=(decision.event, *kept.events), lost=decision.lost, reason=decision.message)
        case other:
            assert_never(other)


def _publish(facts: Facts, change: Publish, wanted_before: int) -> Plan:
    """Publish the roster, and carry it out in the same pass. Pods that it keeps stay untouched."""
    made = _status(facts, change)
    convergence = converge.converge(facts, made)
    own_events = (
        *filter(None, (change.event,)),
        *job_events.of_size(change, wanted_before),
        *job_events.of_move(change, made),
        *job_events.of_ignored_queue(facts.snapshot, wanted_before, facts.roster.wanted),
    )
    published = f"round {facts.roster.next_incarnation}" if facts.roster.replaces_all else f"workers {facts.roster}"
    return Plan(
        made,
        _stages(facts, convergence),
        events=(*own_events, *job_events.of_pass(facts, made)),
        requeue=convergence.requeue,
        lost=change.lost,
        publish=True,
        reason=f"publish {published}: {change.message}" + (f"; {convergence.waits}" if convergence.waits else ""),
    )


def _keep(facts: Facts, repaired: Repaired | None = None) -> Plan:
    observed = _status(facts, repaired)
    convergence = converge.converge(facts, observed)
    requeue = converge.soonest(
        facts,
        convergence.requeue,
        ready_condition.patience(facts),
        waits.until_overdue(facts),
        converge.until_queue_is_read(facts),
        converge.until_forgotten(facts, observed),
    )
    ready = observed.condition(ConditionType.READY)
    return Plan(
        observed,
        _stages(facts, convergence),
        (*job_events.of_queue(facts, observed), *job_events.of_pass(facts, observed)),
        requeue,
        reason=convergence.waits or (ready.message if ready is not None else ""),
    )


def _stages(facts: Facts, convergence: Convergence) -> tuple[Stage, ...]:
    """Put actions into stages. Workers are released only after the store allows the others to train without them;
    nothing else waits for the store. Pods need their group, without which a scheduler would place each by itself. Under
    c10d a worker finds worker 0 by the host name that the service gives it, so pods need the service too."""
    actions = {
        **convergence.actions,
        **workloads.actions(facts),
        StageName.GUARD: (*disruption_budget.actions(facts), *network_policy.actions(facts)),
        StageName.GANG: pod_group.actions(facts),
        StageName.SIZES: converge.set_sizes(facts),
    }
    service = (StageName.NETWORK,) if facts.roster.replaces_all else ()
    group = (StageName.GANG,) if any(isinstance(a, CreatePodGroup) for a in actions[StageName.GANG]) else ()
    needs = {StageName.RELEASE: (StageName.SIZES,), StageName.CREATE: (*service, *group)}
    return staged(actions, needs)


def _status(facts: Facts, change: Publish | Repaired | None = None) -> Status:
    verdict = ready_condition.verdict(facts)
    if isinstance(change, Repaired) and not facts.world.has_quorum:
        verdict = ready_condition.of_change(verdict, ReadyReason.RECOVERING, change.message)
    published = change if isinstance(change, Publish) else None
    if published is not None and published.reason is not None:
        verdict = ready_condition.of_change(verdict, published.reason, published.message)
    restarts = suspects.counted(facts.snapshot.now, _restarts(facts, published), _accusations(facts, change))
    stored = facts.roster if facts.published is not None and not facts.roster.replaces_all else None
    return job_status.render(
        facts.snapshot,
        verdict,
        world=world_status.render(facts),
        existing=min(len(facts.current), facts.roster.wanted),
        ready=facts.ready,
        spares=facts.waiting_spares,
        roster=None if stored is None else roster.to_status(roster.with_started(stored, facts.current)),
        restarts=restarts,
        excluded_nodes=suspects.excluded(facts.snapshot, restarts, creates=bool(converge.missing(facts))),
        recoveries=_recoveries(facts, change),
        refused_since=None if published is not None and _begins_again(facts, published) else waits.refused_since(facts),
    )


def _restarts(facts: Facts, published: Publish | None) -> Restarts:
    before = facts.job.status.restarts
    return before if published is None or published.restarts is None else published.restarts


def _accusations(facts: Facts, change: Publish | Repaired | None) -> list[Accusation]:
    """What workers that were not lost say about nodes."""
    slow = suspects.of_slow_rank(facts.snapshot, facts.current)
    if isinstance(change, Repaired) and change.recovery.stood and change.lost.node is not None:
        return [*slow, Accusation(change.lost.node, Suspicion.HANG)]
    return slow


def _begins_again(facts: Facts, change: Publish) -> bool:
    """Whether a worker that cannot be created has the whole time for its start again: it was given up, or somebody
    has edited the spec. The loss of another worker gives it no more time."""
    given_up = any(loss.cause is Cause.START_TIMEOUT and loss.unstarted for loss in facts.lost)
    return given_up or change.event is None or change.event.reason is not EventReason.WORKER_LOST


def _recoveries(facts: Facts, change: Publish | Repaired | None) -> tuple[RecoveryRecord, ...]:
    records, progress = facts.job.status.recoveries, facts.snapshot.progress
    if change is not None:
        return records if change.recovery is None else _opened(facts, change.recovery, records)
    # Under c10d all ranks of the round have reported a step, even if a readiness probe has not succeeded yet.
    if not (facts.world.has_quorum or facts.roster.replaces_all) or _was_suspended_since(facts, records):
        return records
    full = facts.world.size >= facts.roster.wanted
    step = records[0].step if records else None
    if step is None:  # an older operator opened the record
        step = facts.job.status.restarts.last_step
    records = recovery_record.completed(records, progress, step, _rung(facts, records) if full else Rung.SHRINK)
    if full and ready_condition.trains(facts):
        records = recovery_record.regrown(facts.snapshot.now, progress, records)
    return records


def _rung(facts: Facts, records: tuple[RecoveryRecord, ...]) -> Rung:
    """How a world came to its full size again."""
    without = bool(records) and records[0].worker is not None and records[0].worker not in facts.world.members
    if facts.roster.spares and without:
        return Rung.SPARE
    return Rung.RESTART if records and records[0].rung == Rung.RESTART else Rung.RECREATE


def _was_suspended_since(facts: Facts, records: tuple[RecoveryRecord, ...]) -> bool:
    """Whether the newest recovery was cut short by a suspension: it stays open, because it would count that time."""
    suspended = facts.job.status.condition(ConditionType.SUSPENDED)
    return (
        recovery_record.is_open(records)
        and suspended is not None
        and (suspended.status is ConditionStatus.TRUE or suspended.last_transition_time > records[0].at)
    )


def _opened(facts: Facts, begun: RecoveryStart, records: tuple[RecoveryRecord, ...]) -> tuple[RecoveryRecord, ...]:
    if begun.follows and recovery_record.is_open(records):
        return records
    at = begun.at or facts.snapshot.now
    detected = begun.stood if begun.stood is not None else recovery_record.detected_after(begun.loss.at, at)
    opened = recovery_record.opened(at, begun.loss, records, begun.rung, detected, facts.snapshot.progress.step)
    return recovery_record.moved(opened, facts.snapshot.progress, at) if begun.rung is Rung.MIGRATE else opened
