"""The planner: from one observation of a job to one plan. Start reading here.

The shape of a pass:
  1. a job that is being deleted, managed elsewhere or finished needs no world;
  2. judge: is it complete, past its deadline, has it lost a worker, was it resized?
  3. a change of the world is *published* first (a compare-and-swap on the job's status) and carried out after;
  4. otherwise converge: the pods of the published round, all of them, and no others.

Invariant: which pods should exist is a function of the published status and the spec alone. An operator that wakes up
with an old status can therefore only create pods of an old round, which the commit log refuses (ADR 0001).

With the c10d backend every change of the world is a new round in which every worker is recreated (ADR 0002).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import assert_never

from everstep_operator.api.conditions import Cause, ConditionType, ReadyReason
from everstep_operator.api.events import EventReason
from everstep_operator.api.status import Failure, RecoveryRecord, Restarts, Status, World
from everstep_operator.plan import budget, lifecycle, names, pods, recovery, status
from everstep_operator.plan.actions import Action, CreatePod, CreateService, DeletePod, Event, Plan, Requeue
from everstep_operator.plan.failure import Loss, losses, on_lost_node
from everstep_operator.plan.snapshot import PodPhase, Snapshot, WorkerPod
from everstep_operator.plan.status import Verdict
from everstep_operator.plan.untrusted import harmless

OUR_NAME = "everstep.dev/operator"
# Survivors of a broken round hold nothing that the commit log does not; their accelerators are needed at once.
SURVIVOR_GRACE_SECONDS = 1
# Peers' failures are often seen before the failure that caused them: wait this long for it before judging.
SETTLE = timedelta(seconds=2)
REFUSED_RETRY = timedelta(seconds=15)


@dataclass(frozen=True, slots=True)
class _Complete:
    pass


@dataclass(frozen=True, slots=True)
class _Failed:
    reason: str
    message: str
    loss: Loss | None = None
    event: EventReason = EventReason.JOB_FAILED


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


_Judgement = _Complete | _Failed | _NewRound | _Settling | _KeepRound


def plan(snapshot: Snapshot) -> Plan:
    """Decide what to do about one job. Pure and total: every snapshot has a plan."""
    snapshot = harmless(snapshot)
    job = snapshot.job
    if job.deleting:
        return Plan(job.status, reason="the job is being deleted; garbage collection removes what it owns")
    if job.spec.managed_by not in (None, OUR_NAME):
        return Plan(job.status, reason=f"managed by {job.spec.managed_by}")
    if lifecycle.is_finished(job.status):
        return lifecycle.after_finish(snapshot)
    current = _current(snapshot)
    match _judge(snapshot, current):
        case _Complete():
            return _complete(snapshot, current)
        case _Failed() as failed:
            return _fail(snapshot, current, failed)
        case _NewRound() as change:
            return _publish(snapshot, change)
        case _Settling(until, message):
            observed = _converged_status(snapshot, current)
            events = _converge_events(snapshot, observed)
            return Plan(observed, (), events, Requeue(until, message), reason=message)
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
    if job.spec.suspend:
        if world.size == 0 and names.next_round(snapshot) == world.round + 1:
            return _KeepRound()
        return _NewRound(ReadyReason.SUSPENDED, "spec.suspend is true: no workers", job.status.restarts)
    if world.round == 0 or world.size == 0:
        return _NewRound(ReadyReason.PENDING, f"creating {job.spec.replicas} workers", job.status.restarts)
    if len(current) == world.size and all(p.phase is PodPhase.SUCCEEDED for p in current.values()):
        return _Complete()
    due = lifecycle.deadline(snapshot)
    if due is not None and snapshot.now >= due:
        return _Failed("DeadlineExceeded", f"spec.activeDeadlineSeconds ({job.spec.active_deadline_seconds} s) is over")
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
    step = snapshot.progress.step if snapshot.progress.step is not None else snapshot.job.status.progress.step
    reporting = snapshot.progress.updated_at is not None or snapshot.job.status.progress.updated_at is not None
    spec = snapshot.job.spec.recovery
    match budget.decide(snapshot.now, spec, snapshot.job.status.restarts, root, step, reporting):
        case budget.Fail(reason, message, event):
            return _Failed(reason, message, root, event)
        case budget.Restart(restarts):
            return _NewRound(ReadyReason.RECOVERING, _describe(root), restarts, root)
        case other:
            assert_never(other)


def _describe(loss: Loss) -> str:
    where = f" on {loss.node}" if loss.node else ""
    return f"worker {loss.index}{where} lost ({loss.cause}): {loss.detail}"


def _publish(snapshot: Snapshot, change: _NewRound) -> Plan:
    """Announce the next round, then carry it out in the same pass: old pods away, new pods there. A suspended job is a
    round of no workers, so that what fences an old round fences its pods too."""
    job = snapshot.job
    size = 0 if job.spec.suspend else job.spec.replicas
    world = World(round=names.next_round(snapshot), size=size, since=snapshot.now)
    records = job.status.recoveries
    if change.loss is not None:
        records = recovery.opened(snapshot.now, change.loss, records)
    wanted = status.build(
        snapshot,
        Verdict(change.reason, change.message),
        world=world,
        existing=0,
        ready=0,
        restarts=change.restarts,
        recoveries=records,
    )
    actions, requeue, why = _pods_to_round(snapshot, wanted, {})
    return Plan(
        wanted,
        actions,
        events=_publish_events(snapshot, change),
        requeue=requeue,
        publish=True,
        reason=f"publish round {world.round}: {change.message}" + (f"; {why}" if why else ""),
    )


def _publish_events(snapshot: Snapshot, change: _NewRound) -> tuple[Event, ...]:
    if change.loss is not None:
        return (Event(EventReason.WORKER_LOST, f"{change.message}; recreating the world", warning=True),)
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
    actions, requeue, why = _pods_to_round(snapshot, observed, current)
    due = lifecycle.deadline(snapshot)
    if requeue is None and due is not None:
        requeue = Requeue(due - snapshot.now, "activeDeadlineSeconds")
    ready = observed.condition(ConditionType.READY)
    reason = why or (ready.message if ready is not None else "")
    return Plan(observed, actions, _converge_events(snapshot, observed), requeue, reason=reason)


def _converged_status(snapshot: Snapshot, current: dict[int, WorkerPod]) -> Status:
    job = snapshot.job
    world = job.status.world
    ready = sum(p.ready or p.phase is PodPhase.SUCCEEDED for p in current.values())
    if world.formed_at is None and ready >= world.size > 0:
        world = world.model_copy(update={"formed_at": snapshot.now})
    records = recovery.completed(
        job.status.recoveries, snapshot.progress, snapshot.progress.published_at, job.status.restarts.last_step
    )
    verdict = _verdict(snapshot, current, ready, records)
    return status.build(snapshot, verdict, world=world, existing=len(current), ready=ready, recoveries=records)


def _verdict(
    snapshot: Snapshot, current: dict[int, WorkerPod], ready: int, records: tuple[RecoveryRecord, ...]
) -> Verdict:
    """The Ready condition of a round that stands."""
    job, size = snapshot.job, snapshot.job.status.world.size
    if job.spec.suspend:
        left = f"{len(snapshot.pods)} are ending" if snapshot.pods else "no workers"
        return Verdict(ReadyReason.SUSPENDED, f"spec.suspend is true: {left}")
    before = job.status.condition(ConditionType.READY)
    reason_before = before.reason if before is not None else None
    message = f"{ready}/{size} ready"
    blocked = _blocked(snapshot, current)
    reporting = snapshot.progress.updated_at is not None
    trains = snapshot.progress.round == job.status.world.round and snapshot.progress.trained_at is not None
    if ready >= size and (trains or not reporting):
        return Verdict(ReadyReason.RUNNING, message)
    if reason_before in (ReadyReason.RECOVERING, ReadyReason.RESIZING):
        waits = "waiting for the first step" if ready >= size else "waiting for all workers"
        return Verdict(ReadyReason(reason_before), f"{message}, {waits}" + (f": {blocked}" if blocked else ""), blocked)
    if ready >= size:
        return Verdict(ReadyReason.RUNNING, message)
    if ready > 0:
        return Verdict(ReadyReason.WAITING_FOR_QUORUM, message + (f": {blocked}" if blocked else ""), blocked)
    return Verdict(ReadyReason.PENDING, message + (f": {blocked}" if blocked else ""), blocked)


def _blocked(snapshot: Snapshot, current: dict[int, WorkerPod]) -> str | None:
    """What keeps the first missing worker from running, if anything says so."""
    if snapshot.name_collisions:
        return f"the name {snapshot.name_collisions[0]} is taken by an object that this job does not own; remove it"
    if snapshot.create_refused is not None:
        return f"the API server refuses to create a worker: {snapshot.create_refused}"
    for index in sorted(current):
        pod = current[index]
        if pod.waiting is not None:
            return f"worker {index}: {pod.waiting}"
        if pod.unschedulable is not None:
            return f"worker {index} cannot be scheduled: {pod.unschedulable}"
    return None


def _converge_events(snapshot: Snapshot, observed: Status) -> tuple[Event, ...]:
    before = snapshot.job.status
    events = []
    if observed.world.formed_at is not None and before.world.formed_at is None:
        world = observed.world
        events.append(Event(EventReason.WORLD_FORMED, f"round {world.round} formed with {world.size} workers"))
    if observed.recoveries != before.recoveries and observed.recoveries:
        done = observed.recoveries[0]
        events.append(
            Event(
                EventReason.WORKER_REPLACED,
                f"training goes on {recovery.total_ms(done) / 1000:.1f} s after worker {done.worker} was lost "
                f"({done.cause}); {done.lost_steps if done.lost_steps is not None else 'unknown'} steps are retaken",
            )
        )
        if (step := snapshot.progress.restored_step) is not None:
            took = snapshot.progress.restore_seconds or 0.0
            text = f"the state after step {step} was restored in {took:.1f} s"
            events.append(Event(EventReason.RESTORED_FROM_CHECKPOINT, text))
    committed = observed.checkpoint.last_committed_step
    if committed is not None and committed != before.checkpoint.last_committed_step:
        events.append(Event(EventReason.CHECKPOINT_COMMITTED, f"committed step {committed}"))
    if observed.checkpoint.healthy is False and before.checkpoint.healthy is not False:
        seen = snapshot.progress
        if seen.checkpoint_error is None and seen.checkpoint_damaged is not None:
            events.append(Event(EventReason.CHECKPOINT_CORRUPT, seen.checkpoint_damaged, warning=True))
        else:
            message = seen.checkpoint_error or "a commit failed"
            events.append(Event(EventReason.CHECKPOINT_COMMIT_FAILED, message, warning=True))
    return tuple(events)


def _pods_to_round(
    snapshot: Snapshot, wanted: Status, current: dict[int, WorkerPod]
) -> tuple[tuple[Action, ...], Requeue | None, str]:
    """Actions that leave exactly the pods of `wanted.world`, when to look again, and what is waited for."""
    job, world = snapshot.job, wanted.world
    kept = {p.uid for p in current.values()}
    # A pod of a later round proves that this view of the job is old: such a pod is not ours to end.
    over = (p for p in snapshot.pods if p.uid not in kept and names.is_over(job.name, p, world.round))
    actions: list[Action] = [a for p in over if (a := _remove(snapshot, p)) is not None]
    if snapshot.service_uid is None and world.size > 0:
        actions.insert(0, CreateService(names.service_name(job.name), pods.service(job), "workers need host names"))
    missing = [i for i in range(world.size) if i not in current]
    if not missing:
        return tuple(actions), None, ""
    start = budget.not_before(job.spec.recovery, wanted.restarts)
    if start is not None and snapshot.now < start and world.round > 1:
        left = start - snapshot.now
        return tuple(actions), Requeue(left, "back-off"), f"backs off for {left.total_seconds():.0f} s"
    incarnation = names.incarnation_of_round(world.round)
    for index in missing[: snapshot.settings.max_pods_per_plan]:
        body = pods.worker_pod(job, index, world.round, world.size, snapshot.settings)
        name = names.pod_name(job.name, index, incarnation)
        actions.append(CreatePod(name, index, incarnation, body, f"worker {index} of round {world.round}"))
    # Tried again in every pass, and after a while even if nothing is seen to change: what frees a name sends no event.
    if snapshot.name_collisions:
        return tuple(actions), Requeue(REFUSED_RETRY, "name taken"), f"{snapshot.name_collisions[0]} is not ours"
    if snapshot.create_refused is not None:
        return tuple(actions), Requeue(REFUSED_RETRY, "creates were refused"), "the API server refuses creates"
    return tuple(actions), None, ""


def _remove(snapshot: Snapshot, pod: WorkerPod) -> DeletePod | None:
    """Take away a pod of an earlier round. On a lost node nobody would confirm it, so it is taken by force: what may
    still run there is fenced by the commit log."""
    lost = on_lost_node(pod, snapshot.nodes, snapshot.now)
    if pod.deleted_at is not None and not lost:
        return None
    # A suspended job's workers are healthy: they get the time that their template asks for.
    patience = pods.grace_seconds(snapshot.job) if snapshot.job.spec.suspend else SURVIVOR_GRACE_SECONDS
    grace = 0 if lost or pod.finished else patience
    why = f"node {pod.node} is lost" if lost else f"round {pod.round} is over"
    return DeletePod(pod.name, pod.uid, grace, why)


def _complete(snapshot: Snapshot, current: dict[int, WorkerPod]) -> Plan:
    size = snapshot.job.status.world.size
    done = status.build(
        snapshot,
        Verdict(ReadyReason.COMPLETE, f"all {size} workers succeeded"),
        world=snapshot.job.status.world,
        existing=len(current),
        ready=0,
        finished_at=snapshot.now,
    )
    event = Event(EventReason.JOB_COMPLETED, f"all {size} workers succeeded")
    return Plan(done, lifecycle.clean_up(snapshot), (event,), publish=True, reason=event.message)


def _fail(snapshot: Snapshot, current: dict[int, WorkerPod], failed: _Failed) -> Plan:
    loss = failed.loss
    failure = Failure(
        cause=loss.cause if loss is not None else Cause.ERROR,
        message=f"{failed.reason}: {failed.message}"[: status.MAX_MESSAGE],
        at=(loss.at if loss is not None else None) or snapshot.now,
        worker=loss.index if loss is not None else None,
        pod=loss.pod if loss is not None else None,
        node=loss.node if loss is not None else None,
        exit_code=loss.exit_code if loss is not None else None,
        log_lines=loss.log_lines if loss is not None else (),
    )
    ended = status.build(
        snapshot,
        Verdict(ReadyReason.FAILED, failure.message),
        world=snapshot.job.status.world,
        existing=len(current),
        ready=0,
        failure=failure,
        finished_at=snapshot.now,
    )
    # An event's reason stands beside its message: said once.
    event = Event(failed.event, failed.message if failed.reason == failed.event else failure.message, warning=True)
    return Plan(ended, lifecycle.clean_up(snapshot), (event,), publish=True, reason=failure.message)
