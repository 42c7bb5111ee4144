"""The c10d way: any change of the world is a new round in which every worker is recreated (ADR 0002).

What is published is `status.world`: its round and size say which pods should exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import assert_never

from everstep_operator.api.conditions import Cause, ConditionType, ReadyReason
from everstep_operator.api.events import EventReason
from everstep_operator.api.status import Restarts, Status, World
from everstep_operator.plan import names
from everstep_operator.plan.actions import CreatePod
from everstep_operator.plan.build import events, finish, pods, recovery_record, status
from everstep_operator.plan.build.converge import SURVIVOR_GRACE_SECONDS, Carried, Over, blocked, carry, or_deadline
from everstep_operator.plan.build.finish import Failed
from everstep_operator.plan.build.status import Verdict
from everstep_operator.plan.decide import restart_budget, start_failures
from everstep_operator.plan.outcome import Event, Plan, Requeue
from everstep_operator.plan.snapshot import PodPhase, Snapshot, WorkerPod
from everstep_operator.plan.stages import Stage, StageName, staged
from everstep_operator.plan.state.losses import Loss, losses

# Peers' failures are often seen before the failure that caused them: wait this long for it before judging.
SETTLE = timedelta(seconds=2)


@dataclass(frozen=True, slots=True)
class _Complete:
    pass


@dataclass(frozen=True, slots=True)
class _NewRound:
    reason: ReadyReason
    message: str
    restarts: Restarts
    loss: Loss | None = None


@dataclass(frozen=True, slots=True)
class _Settling:
    until: timedelta
    message: str


@dataclass(frozen=True, slots=True)
class _KeepRound:
    pass


_Judgement = _Complete | Failed | _NewRound | _Settling | _KeepRound


def plan(snapshot: Snapshot) -> Plan:
    """The plan for a job that is neither finished nor somebody else's."""
    current = _current(snapshot)
    match _judge(snapshot, current):
        case _Complete():
            return finish.complete(snapshot, len(current), snapshot.job.status.world.size)
        case Failed() as failed:
            return finish.fail(snapshot, len(current), failed)
        case _NewRound() as change:
            return _publish(snapshot, change)
        case _Settling(until, message):
            observed = _converged_status(snapshot, current)
            told = events.events(snapshot, observed)
            return Plan(observed, (), told, Requeue(until, message), reason=message)
        case _KeepRound():
            return _converge(snapshot, current)
        case other:
            assert_never(other)


def _current(snapshot: Snapshot) -> dict[int, WorkerPod]:
    """The pods of the published round by index."""
    world = snapshot.job.status.world
    found = (p for p in snapshot.pods if p.round == world.round and p.index < world.size)
    return {p.index: p for p in found if p.name == _pod_name(snapshot, p.index)}


def _pod_name(snapshot: Snapshot, index: int) -> str:
    job = snapshot.job
    return names.pod_name(job.name, index, names.incarnation_of_round(job.status.world.round))


def _judge(snapshot: Snapshot, current: dict[int, WorkerPod]) -> _Judgement:
    job = snapshot.job
    world = job.status.world
    # Before anything else: a job that has ended is not suspended or resized.
    if world.size > 0 and len(current) == world.size and all(p.phase is PodPhase.SUCCEEDED for p in current.values()):
        return _Complete()
    if job.spec.suspend:
        if world.size == 0 and names.next_round(snapshot) == world.round + 1:
            return _KeepRound()
        return _NewRound(ReadyReason.SUSPENDED, "spec.suspend is true: no workers", job.status.restarts)
    if world.round == 0 or world.size == 0:
        return _NewRound(ReadyReason.PENDING, f"creating {job.spec.replicas} workers", job.status.restarts)
    if (late := finish.overdue(snapshot)) is not None:
        return late
    lost = losses(snapshot, current, world.size, formed=world.formed_at is not None)
    if lost:
        return _judge_loss(snapshot, lost)
    if job.spec.replicas != world.size:
        return _NewRound(
            ReadyReason.RESIZING, f"resizing from {world.size} to {job.spec.replicas} workers", job.status.restarts
        )
    return _KeepRound()


def _judge_loss(snapshot: Snapshot, lost: tuple[Loss, ...]) -> _Judgement:
    root = lost[0]
    if root.cause is Cause.PEER_LOST and root.at is not None and len(lost) < snapshot.job.status.world.size:
        waited = snapshot.now - root.at
        if timedelta(0) <= waited < SETTLE:
            return _Settling(SETTLE - waited, f"worker {root.index} lost a peer; waiting to see which one")
    match restart_budget.judge(snapshot, root):
        case restart_budget.Fail(reason, message, event):
            return Failed(reason, message, root, event)
        case restart_budget.Restart(restarts):
            return _NewRound(ReadyReason.RECOVERING, root.sentence, restarts, root)
        case other:
            assert_never(other)


def _publish(snapshot: Snapshot, change: _NewRound) -> Plan:
    """Announce the next round, then carry it out in the same pass: old pods away, new pods there. A suspended job is a
    round of no workers, so that what fences an old round fences its pods too."""
    job = snapshot.job
    size = 0 if job.spec.suspend else job.spec.replicas
    world = World(round=names.next_round(snapshot), size=size, since=snapshot.now)
    records = job.status.recoveries
    if change.loss is not None:
        records = recovery_record.opened(snapshot.now, change.loss, records)
    wanted = status.build(
        snapshot,
        Verdict(change.reason, change.message),
        world=world,
        existing=0,
        ready=0,
        restarts=change.restarts,
        recoveries=records,
    )
    carried = _carry(snapshot, wanted, {})
    return Plan(
        wanted,
        _stages(carried),
        events=_publish_events(snapshot, change),
        requeue=carried.requeue,
        publish=True,
        reason=f"publish round {world.round}: {change.message}" + (f"; {carried.waits}" if carried.waits else ""),
    )


def _publish_events(snapshot: Snapshot, change: _NewRound) -> tuple[Event, ...]:
    if change.loss is not None:
        what = "recreating the world" + start_failures.tried(snapshot, change.restarts)
        return (Event(EventReason.WORKER_LOST, f"{change.message}; {what}"),)
    if change.reason is ReadyReason.RESIZING:
        return (Event(EventReason.WORLD_RESIZED, change.message),)
    if change.reason is ReadyReason.SUSPENDED:
        return (Event(EventReason.JOB_SUSPENDED, change.message),)
    before = snapshot.job.status.condition(ConditionType.READY)
    if before is not None and before.reason == ReadyReason.SUSPENDED:
        return (Event(EventReason.JOB_RESUMED, change.message),)
    return ()


def _converge(snapshot: Snapshot, current: dict[int, WorkerPod]) -> Plan:
    observed = _converged_status(snapshot, current)
    carried = _carry(snapshot, observed, current)
    requeue = or_deadline(snapshot, carried.requeue)
    ready = observed.condition(ConditionType.READY)
    reason = carried.waits or (ready.message if ready is not None else "")
    return Plan(observed, _stages(carried), events.events(snapshot, observed), requeue, reason=reason)


def _stages(carried: Carried) -> tuple[Stage, ...]:
    """A worker finds worker 0 by the host name that the service gives it, and waits in vain without."""
    return staged(carried.actions, {StageName.CREATE: (StageName.NETWORK,)})


def _converged_status(snapshot: Snapshot, current: dict[int, WorkerPod]) -> Status:
    job = snapshot.job
    world = job.status.world
    ready = sum(p.ready and not p.finished for p in current.values())
    succeeded = sum(p.phase is PodPhase.SUCCEEDED for p in current.values())
    if world.formed_at is None and ready + succeeded >= world.size > 0:
        world = world.model_copy(update={"formed_at": snapshot.now})
    records = recovery_record.completed(
        job.status.recoveries, snapshot.progress, snapshot.progress.published_at, job.status.restarts.last_step
    )
    verdict = _verdict(snapshot, current, ready, succeeded)
    return status.build(
        snapshot,
        verdict,
        world=world,
        existing=len(current),
        ready=ready,
        succeeded=succeeded,
        recoveries=records,
    )


def _verdict(snapshot: Snapshot, current: dict[int, WorkerPod], ready: int, succeeded: int) -> Verdict:
    """The Ready condition of a round that stands."""
    job, size = snapshot.job, snapshot.job.status.world.size
    if job.spec.suspend:
        left = f"{len(snapshot.pods)} are ending" if snapshot.pods else "no workers"
        return Verdict(ReadyReason.SUSPENDED, f"spec.suspend is true: {left}")
    before = job.status.condition(ConditionType.READY)
    reason_before = before.reason if before is not None else None
    message = f"{ready}/{size} ready" + (f", {succeeded} succeeded" if succeeded else "")
    there = ready + succeeded
    why = blocked(snapshot, current)
    reporting = snapshot.progress.updated_at is not None
    trains = snapshot.progress.round == job.status.world.round and snapshot.progress.trained_at is not None
    if there >= size and (trains or not reporting):
        return Verdict(ReadyReason.RUNNING, message)
    if reason_before in (ReadyReason.RECOVERING, ReadyReason.RESIZING):
        waits = "waiting for the first step" if there >= size else "waiting for all workers"
        return Verdict(ReadyReason(reason_before), f"{message}, {waits}" + (f": {why}" if why else ""), why)
    if there >= size:
        return Verdict(ReadyReason.RUNNING, message)
    if there > 0:
        return Verdict(ReadyReason.WAITING_FOR_QUORUM, message + (f": {why}" if why else ""), why)
    return Verdict(ReadyReason.PENDING, message + (f": {why}" if why else ""), why)


def _carry(snapshot: Snapshot, wanted: Status, current: dict[int, WorkerPod]) -> Carried:
    """What leaves exactly the pods of `wanted.world`."""
    job, world = snapshot.job, wanted.world
    kept = {p.uid for p in current.values()}
    # A pod of a later round proves that this view of the job is old: such a pod is not ours to end.
    over = (p for p in snapshot.pods if p.uid not in kept and names.is_over(job.name, p, world.round))
    incarnation = names.incarnation_of_round(world.round)

    def create(index: int) -> CreatePod:
        body = pods.worker_pod(job, index, world.round, world.size, snapshot.settings)
        name = names.pod_name(job.name, index, incarnation)
        return CreatePod(name, index, incarnation, body, f"worker {index} of round {world.round}")

    # A suspended job's workers are healthy: they get the time that their template asks for.
    grace = pods.grace_seconds(job) if job.spec.suspend else SURVIVOR_GRACE_SECONDS
    return carry(
        snapshot,
        wanted,
        [Over(p, f"round {p.round} is over", grace) for p in over],
        [i for i in range(world.size) if i not in current],
        create,
        workers=world.size,
    )
