"""The way of the backends `everstep` and `etcd`: one worker at a time (ADR 0010).

What is published is `status.roster`: which indices should exist, each in which incarnation. A loss raises the
incarnation of that index and of no other; agents agree among themselves who trains meanwhile. Invariant: no pod is
deleted but one that was replaced, was taken out by a resize, or has no work left: survivors keep their pods.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import assert_never

from everstep_operator.api.conditions import ConditionType, ReadyReason, Rung
from everstep_operator.api.events import EventReason
from everstep_operator.api.status import RecoveryRecord, Restarts, Status
from everstep_operator.plan.actions import CreatePod, SetSizes
from everstep_operator.plan.build import (
    disruption_budget,
    events,
    finish,
    pods,
    ready_condition,
    recovery_record,
    status,
)
from everstep_operator.plan.build.converge import SURVIVOR_GRACE_SECONDS, Carried, Over, carry, or_deadline
from everstep_operator.plan.build.finish import Failed
from everstep_operator.plan.decide import restart_budget, start_failures
from everstep_operator.plan.outcome import Event, Plan
from everstep_operator.plan.snapshot import PodPhase, Snapshot, WorkerPod
from everstep_operator.plan.stages import Stage, StageName, staged
from everstep_operator.plan.state import roster, sizing, world_state
from everstep_operator.plan.state.losses import Loss, losses_among
from everstep_operator.plan.state.roster import Roster
from everstep_operator.plan.state.world_state import Standing

# Losses of workers that were there when an incident began, so soon after it, are part of it.
INCIDENT = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class _Complete:
    size: int


@dataclass(frozen=True, slots=True)
class _Revise:
    """Publish this roster. `reason` None: the Ready condition says what it would say anyway."""

    roster: Roster
    message: str
    reason: ReadyReason | None = None
    restarts: Restarts | None = None
    recoveries: tuple[RecoveryRecord, ...] | None = None
    event: Event | None = None


@dataclass(frozen=True, slots=True)
class _Keep:
    pass


_Judgement = _Complete | Failed | _Revise | _Keep


def plan(snapshot: Snapshot) -> Plan:
    """The plan for a job that is neither finished nor somebody else's."""
    job = snapshot.job
    published = roster.read(job.status.roster)
    current = published.current(job.name, snapshot.pods)
    match _judge(snapshot, published, current):
        case _Complete(size):
            return finish.complete(snapshot, len(current), size)
        case Failed() as failed:
            return finish.fail(snapshot, len(current), failed)
        case _Revise() as change:
            return _publish(snapshot, change)
        case _Keep():
            return _converge(snapshot, published, current)
        case other:
            assert_never(other)


def _judge(snapshot: Snapshot, published: Roster, current: dict[int, WorkerPod]) -> _Judgement:
    job = snapshot.job
    wanted = sizing.wanted(job.spec)
    seen = world_state.of(snapshot, published, current)
    lost = losses_among(snapshot, current, {index: life.started for index, life in published.lives.items()})
    # Before anything else: a job that has ended is not suspended, resized or opened again.
    if (size := world_state.completed(snapshot, published, seen, current, lost)) is not None:
        return _Complete(size)
    if job.spec.suspend:
        return _suspend(snapshot, published)
    if job.status.roster is None or published.wanted == 0:
        return _open(snapshot, published, wanted)
    if (late := finish.overdue(snapshot)) is not None:
        return late
    if missed := world_state.missed(snapshot, seen, current, lost):
        return _judge_loss(snapshot, published, current, seen, missed)
    if world_state.ends(snapshot, current):
        return _Keep()
    target = roster.revised(published, wanted, (), replaced=_regrows(snapshot))
    if wanted != published.wanted:
        message = f"resizing from {published.wanted} to {wanted} workers"
        return _Revise(target, message, ReadyReason.RESIZING, event=Event(EventReason.WORLD_RESIZED, message))
    if (newer := roster.caught_up(snapshot, target)) != published:
        return _Revise(newer, "the published workers were not those that are wanted, or behind their pods")
    return _Keep()


def _suspend(snapshot: Snapshot, published: Roster) -> _Judgement:
    """A roster of no workers, so that an operator with an old view cannot bring the pods back."""
    message = "spec.suspend is true: no workers"
    if snapshot.job.status.roster is None:
        published = roster.opening(snapshot, 0)
    elif published.wanted == 0 and not published.lives and roster.caught_up(snapshot, published) == published:
        return _Keep()
    none = roster.caught_up(snapshot, roster.revised(published, 0, published.lives, replaced=False))
    return _Revise(none, message, ReadyReason.SUSPENDED, event=Event(EventReason.JOB_SUSPENDED, message))


def _open(snapshot: Snapshot, published: Roster, wanted: int) -> _Judgement:
    message = f"creating {wanted} workers"
    if snapshot.job.status.roster is None:
        return _Revise(roster.opening(snapshot, wanted), message, ReadyReason.PENDING)
    before = snapshot.job.status.condition(ConditionType.READY)
    resumed = before is not None and before.reason == ReadyReason.SUSPENDED
    return _Revise(
        roster.revised(published, wanted, (), replaced=True),
        message,
        ReadyReason.PENDING,
        event=Event(EventReason.JOB_RESUMED, message) if resumed else None,
    )


def _judge_loss(
    snapshot: Snapshot, published: Roster, current: dict[int, WorkerPod], seen: Standing, lost: tuple[Loss, ...]
) -> _Judgement:
    root = lost[0]
    if (why := world_state.given_up(snapshot, current, lost)) is not None:
        return Failed("RendezvousClosed", f"{root.sentence}; the agents gave the job up: {why}", root)
    follows = _follows(snapshot, current.get(root.index))
    match restart_budget.judge(snapshot, root, follows=follows):
        case restart_budget.Fail(reason, message, event):
            return Failed(reason, message, root, event)
        case restart_budget.Restart(restarts):
            pass
        case other:
            assert_never(other)
    indices = {loss.index for loss in lost}
    hit = not indices.isdisjoint(seen.members)
    replaced = not _can_do_without(snapshot, published, indices)
    if hit and replaced:
        # Who has finished would be missed by those that come back: one result is no result.
        indices |= {i for i, p in current.items() if p.phase is PodPhase.SUCCEEDED}
    if not follows:
        restarts = restarts.model_copy(update={"incident_at": snapshot.now})
    records = snapshot.job.status.recoveries
    if hit and not (follows and recovery_record.is_open(records)):
        records = recovery_record.opened(snapshot.now, root, records, Rung.RECREATE if replaced else Rung.SHRINK)
    more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    message = root.sentence + more
    what = f"replacing {_workers(indices)}" if replaced else "going on without a replacement (spec.elastic.regrow)"
    return _Revise(
        roster.revised(published, sizing.wanted(snapshot.job.spec), indices, replaced=replaced),
        message,
        ReadyReason.RECOVERING if hit else None,
        restarts,
        records,
        Event(EventReason.WORKER_LOST, f"{message}; {what}{start_failures.tried(snapshot, restarts)}"),
    )


def _follows(snapshot: Snapshot, pod: WorkerPod | None) -> bool:
    """Whether a loss belongs to the last incident: soon after it, and of a worker that was there when it began."""
    began = snapshot.job.status.restarts.incident_at
    if began is None or snapshot.now - began > INCIDENT:
        return False
    if pod is None or pod.created_at is None:
        return True
    # Kubernetes tells whole seconds: in that of the incident, only a job's first pods were there before it.
    second = began.replace(microsecond=0)
    return pod.created_at < second or (pod.created_at == second and pod.incarnation == 0)


def _regrows(snapshot: Snapshot) -> bool:
    elastic = snapshot.job.spec.elastic
    return elastic is None or elastic.regrow


def _can_do_without(snapshot: Snapshot, published: Roster, lost: set[int]) -> bool:
    """Whether lost workers stay lost: `regrow: false`, and enough are left."""
    left = len(published.lives) - len(lost)
    return not _regrows(snapshot) and sizing.bounds(snapshot.job.spec).largest(left) > 0


def _workers(indices: set[int]) -> str:
    shown = sorted(indices)
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f"worker{'s' if len(shown) > 1 else ''} {', '.join(map(str, shown[:8]))}{more}"


def _publish(snapshot: Snapshot, change: _Revise) -> Plan:
    """Announce the roster, then carry it out in the same pass. No pod that it keeps is touched."""
    job = snapshot.job
    current = change.roster.current(job.name, snapshot.pods)
    wanted = _status(snapshot, change.roster, current, change)
    carried = _carry(snapshot, wanted, change.roster, current)
    news = () if change.event is None else (change.event,)
    return Plan(
        wanted,
        _stages(snapshot, carried),
        events=(*news, *_events(snapshot, wanted, current)),
        requeue=carried.requeue,
        publish=True,
        reason=f"publish workers {change.roster}: {change.message}" + (f"; {carried.waits}" if carried.waits else ""),
    )


def _converge(snapshot: Snapshot, published: Roster, current: dict[int, WorkerPod]) -> Plan:
    observed = _status(snapshot, published, current, None)
    carried = _carry(snapshot, observed, published, current)
    requeue = carried.requeue or ready_condition.patience(snapshot, current)
    ready = observed.condition(ConditionType.READY)
    return Plan(
        observed,
        _stages(snapshot, carried),
        _events(snapshot, observed, current),
        or_deadline(snapshot, requeue),
        reason=carried.waits or (ready.message if ready is not None else ""),
    )


def _stages(snapshot: Snapshot, carried: Carried) -> tuple[Stage, ...]:
    """Workers are released when those that stay may train without them; nothing else waits for the store."""
    actions = {
        **carried.actions,
        StageName.GUARD: disruption_budget.actions(snapshot),
        StageName.SIZES: _told(snapshot),
    }
    return staged(actions, {StageName.RELEASE: (StageName.SIZES,)})


def _told(snapshot: Snapshot) -> tuple[SetSizes, ...]:
    """The sizes, if the agents' store is ours and holds others. While nothing is wanted the last ones stand."""
    view, wanted = snapshot.world, sizing.present(snapshot.job.spec)
    if view is None or view.closed is not None or view.sizes == wanted or snapshot.job.spec.suspend:
        return ()
    why = "nobody was told any" if view.sizes is None else f"in place of {view.sizes}"
    return (SetSizes(wanted, why),)


def _events(snapshot: Snapshot, observed: Status, current: dict[int, WorkerPod]) -> tuple[Event, ...]:
    unplaced = ready_condition.starved(snapshot, current)
    return (*events.of_capacity(snapshot, observed, unplaced), *events.events(snapshot, observed))


def _status(snapshot: Snapshot, wanted: Roster, current: dict[int, WorkerPod], change: _Revise | None) -> Status:
    job, seen = snapshot.job, world_state.of(snapshot, wanted, current)
    world = world_state.world(snapshot, seen)
    if wanted.wanted == 0:
        world = world.model_copy(update={"size": 0, "formed_at": None, "formed_round": None})
    records = change.recoveries if change is not None and change.recoveries is not None else job.status.recoveries
    if change is None and seen.stands:
        rung = Rung.RECREATE if seen.size >= wanted.wanted else Rung.SHRINK
        records = recovery_record.completed_as(records, snapshot.progress, job.status.restarts.last_step, rung)
        if seen.size >= wanted.wanted and ready_condition.trains(snapshot, seen):
            records = recovery_record.regrown(snapshot.now, snapshot.progress, records)
    verdict = ready_condition.verdict(snapshot, wanted, current, seen)
    if change is not None and change.reason is not None:
        verdict = ready_condition.of_change(verdict, change.reason, change.message)
    return status.build(
        snapshot,
        verdict,
        world=world,
        existing=len(current),
        ready=sum(p.ready and not p.finished for p in current.values()),
        roster=roster.write(roster.marked(wanted, current)),
        restarts=change.restarts if change is not None else None,
        recoveries=records,
    )


def _carry(snapshot: Snapshot, wanted: Status, made: Roster, current: dict[int, WorkerPod]) -> Carried:
    """What leaves exactly the pods of the roster."""
    job = snapshot.job
    kept = {p.uid for p in current.values()}
    over = [p for p in snapshot.pods if p.uid not in kept and made.is_over(job.name, p, job.status.world.round)]

    def create(index: int) -> CreatePod:
        incarnation = made.lives[index].incarnation
        body = pods.agent_pod(job, index, incarnation, snapshot.settings)
        return CreatePod(made.name(job.name, index), index, incarnation, body, f"worker {index}")

    def end(pod: WorkerPod) -> Over:
        if pod.index in made.lives:
            return Over(pod, "it was replaced", SURVIVOR_GRACE_SECONDS)
        # It is healthy, so it gets the time that its template asks for.
        return Over(pod, "it is not wanted any more", pods.grace_seconds(job), released=True)

    # One that has started is not missing but lost: it comes back in another incarnation, or is not missed.
    missing = [index for index, life in made.lives.items() if index not in current and not life.started]
    return carry(
        snapshot,
        wanted,
        [end(p) for p in over],
        [] if world_state.ends(snapshot, current) else missing,
        create,
        workers=len(made.lives),
    )
