"""Builds the status, which people and programs read, from what was observed.

Conditions follow kstatus. The reason of Ready is the STATUS column. Reconciling is true while the operator works
towards the spec, and Stalled while it cannot and the job does not train. A condition's transition time changes only
with its status, so nothing is written when nothing happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from everstep_operator import object_names
from everstep_operator.api.base import SAFE_INT_MAX
from everstep_operator.api.conditions import ConditionStatus, ConditionType, FailedReason, ReadyReason
from everstep_operator.api.status import (
    CheckpointStatus,
    Condition,
    ExcludedNode,
    Failure,
    PeakMemory,
    Progress,
    RecoveryRecord,
    Restarts,
    Roster,
    Spares,
    Status,
    World,
)
from everstep_operator.api.types import MAX_SPARES, RendezvousBackend
from everstep_operator.plan.snapshot import ReportedPeak, Snapshot

MAX_MESSAGE = 1024
# Reasons of CheckpointHealthy, by the worker library's error with which a report begins.
_UNUSABLE = {"Occupied": "InUse", "StoreUnusable": "Unusable", "OwnerUnknown": "Unusable"}


@dataclass(frozen=True, slots=True)
class Quorum:
    """Whether enough workers train. `reason` is the condition's if they do."""

    reached: bool
    message: str
    reason: str = "Reached"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of this pass, in the words of the Ready condition."""

    reason: ReadyReason
    message: str
    obstacle: str | None = None  # what the operator cannot overcome by itself
    quorum: Quorum | None = None  # None: the job is over
    failed: FailedReason | None = None  # why the job ended, if without success


def render(
    snapshot: Snapshot,
    verdict: Verdict,
    *,
    world: World,
    existing: int,
    ready: int,
    spares: tuple[int, ...] = (),
    roster: Roster | None = None,
    restarts: Restarts | None = None,
    recoveries: tuple[RecoveryRecord, ...] | None = None,
    failure: Failure | None = None,
    finished_at: datetime | None = None,
    refused_since: datetime | None = None,
    excluded_nodes: tuple[ExcludedNode, ...] = (),
) -> Status:
    """The whole status. Values that are not given are those of the observed status; `refused_since` and
    `excluded_nodes` are none then."""
    job, old = snapshot.job, snapshot.job.status
    if roster is None and job.spec.rendezvous.backend is not RendezvousBackend.C10D:
        roster = old.roster
    wanted = world.size if roster is None else roster.wanted
    start, earlier = _activity(snapshot, wanted > 0, finished_at is not None)
    return Status(
        observed_generation=job.generation,
        replicas=existing,
        ready_replicas=ready,
        spares=_spares(roster, spares),
        selector=object_names.selector(job.name),
        start_time=start,
        earlier_active_seconds=earlier,
        completion_time=old.completion_time or finished_at,
        refused_since=refused_since,
        rerun=job.rerun,
        history=old.history,
        world=world,
        roster=roster,
        progress=_progress(snapshot),
        checkpoint=_checkpoint(snapshot),
        restarts=restarts if restarts is not None else old.restarts,
        excluded_nodes=excluded_nodes,
        recoveries=recoveries if recoveries is not None else old.recoveries,
        goodput_percent=_goodput(snapshot, finished_at),
        state_seconds=old.state_seconds,
        failure=old.failure or failure,
        conditions=_conditions(snapshot, verdict, world, ready),
    )


def _spares(roster: Roster | None, waiting: tuple[int, ...]) -> Spares | None:
    if roster is None or not roster.spares:
        return None
    waiting = waiting[: min(roster.spares, MAX_SPARES)]
    return Spares(wanted=roster.spares, ready=len(waiting), workers=waiting)


def _activity(snapshot: Snapshot, active: bool, finished: bool) -> tuple[datetime | None, int]:
    """Since when the job has wanted workers, and for how many seconds before that. While it wants none, perhaps because
    it waits for a queue, no time counts."""
    now, old = snapshot.now, snapshot.job.status
    if active and not finished:
        return old.start_time or now, old.earlier_active_seconds
    if finished or old.start_time is None:
        return old.start_time, old.earlier_active_seconds
    # An older operator left the start in the status of a suspended job.
    suspended = old.condition(ConditionType.SUSPENDED)
    already = suspended is not None and suspended.status is ConditionStatus.TRUE
    ended = suspended.last_transition_time if suspended is not None and already else now
    return None, min(SAFE_INT_MAX, round(old.active_seconds(ended)))


def _progress(snapshot: Snapshot) -> Progress:
    seen, old = snapshot.progress, snapshot.job.status.progress
    if seen.updated_at is None:
        return old
    step = seen.step if seen.step is not None else old.step
    total = seen.total_steps if seen.total_steps is not None else old.total_steps
    eta = None
    if step is not None and total is not None and seen.step_seconds is not None:
        eta = min(SAFE_INT_MAX, max(0, round((total - step) * seen.step_seconds)))
    return Progress(
        step=step,
        total_steps=total,
        epoch=seen.epoch if seen.epoch is not None else old.epoch,
        eta_seconds=eta,
        metrics={name: f"{value:.6g}" for name, value in sorted(seen.metrics.items())} or old.metrics,
        straggler=seen.straggler and seen.straggler[:MAX_MESSAGE],
        rehearsed=seen.rehearsed and seen.rehearsed[:MAX_MESSAGE],
        memory=_memory(seen.memory) or old.memory,
        stepped_at=seen.stepped_at or old.stepped_at,
        updated_at=seen.updated_at,
    )


def _memory(seen: ReportedPeak | None) -> PeakMemory | None:
    if seen is None:
        return None
    return PeakMemory(bytes=seen.host, rank=seen.rank, device_bytes=seen.device, device_rank=seen.device_rank)


def _checkpoint(snapshot: Snapshot) -> CheckpointStatus:
    seen, old = snapshot.progress, snapshot.job.status.checkpoint
    spec = snapshot.job.spec.checkpoint
    newer = seen.committed_step is not None
    healthy = old.healthy
    if seen.checkpoint_error is not None or seen.checkpoint_damaged is not None:
        healthy = False
    elif newer:
        healthy = True
    return CheckpointStatus(
        last_committed_step=seen.committed_step if newer else old.last_committed_step,
        committed_at=seen.committed_at if newer else old.committed_at,
        url=spec.url if spec is not None else None,
        healthy=healthy,
        skipped_saves=max(seen.skipped_saves, old.skipped_saves),
    )


def _goodput(snapshot: Snapshot, finished_at: datetime | None) -> int | None:
    """The time of new steps as a share of the time for which the job has wanted workers."""
    old = snapshot.job.status
    if snapshot.progress.productive_seconds <= 0 or old.completion_time is not None:
        return old.goodput_percent
    wall = old.active_seconds(finished_at or snapshot.now)
    return min(100, round(100 * snapshot.progress.productive_seconds / wall)) if wall > 0 else old.goodput_percent


# Conditions that are true for one reason of Ready only, with their message otherwise: `kubectl describe` shows all of
# them.
_OF_ONE_REASON = (
    (ConditionType.RECOVERING, ReadyReason.RECOVERING, "no recovery is under way"),
    (ConditionType.RESIZING, ReadyReason.RESIZING, "the world has the size that was asked for"),
    (ConditionType.SUSPENDED, ReadyReason.SUSPENDED, "the job is not suspended"),
    (ConditionType.COMPLETE, ReadyReason.COMPLETE, "training has not ended"),
    (ConditionType.FAILED, ReadyReason.FAILED, "the job has not given up"),
)


def _conditions(snapshot: Snapshot, verdict: Verdict, world: World, ready: int) -> tuple[Condition, ...]:
    reason, message = verdict.reason, verdict.message[:MAX_MESSAGE]
    running = reason in (ReadyReason.RUNNING, ReadyReason.RUNNING_DEGRADED)
    over = reason in (ReadyReason.COMPLETE, ReadyReason.FAILED)
    reconciled = running or over or (reason is ReadyReason.SUSPENDED and not snapshot.pods)
    conditions: dict[ConditionType, tuple[bool, str, str]] = {
        ConditionType.READY: (running or reason is ReadyReason.COMPLETE, reason, message),
        ConditionType.RECONCILING: (not reconciled, reason, message),
        ConditionType.STALLED: _stalled(verdict),
        ConditionType.QUORUM_REACHED: _quorum(verdict, world, ready),
    }
    for type_, its_reason, otherwise in _OF_ONE_REASON:
        holds = reason is its_reason
        conditions[type_] = (holds, reason, message if holds else otherwise)
    if verdict.failed is not None:
        conditions[ConditionType.FAILED] = (True, verdict.failed, message)
    if verdict.obstacle is not None:
        conditions[ConditionType.NEEDS_ATTENTION] = (True, "WaitsForPerson", verdict.obstacle[:MAX_MESSAGE])
    elif snapshot.job.status.condition(ConditionType.NEEDS_ATTENTION) is not None:
        conditions[ConditionType.NEEDS_ATTENTION] = (False, reason, "nothing waits for a person")
    seen = snapshot.progress
    if seen.checkpoint_error is not None:
        why = _UNUSABLE.get(seen.checkpoint_error.partition(":")[0], "CommitFailed")
        conditions[ConditionType.CHECKPOINT_HEALTHY] = (False, why, seen.checkpoint_error[:MAX_MESSAGE])
    elif seen.checkpoint_damaged is not None:
        conditions[ConditionType.CHECKPOINT_HEALTHY] = (False, "Damaged", seen.checkpoint_damaged[:MAX_MESSAGE])
    elif seen.committed_step is not None:
        conditions[ConditionType.CHECKPOINT_HEALTHY] = (True, "Committed", "the last commit succeeded")
    old = {c.type: c for c in snapshot.job.status.conditions}
    made = {
        type_: _condition(old.get(type_), type_, status, why, text, snapshot)
        for type_, (status, why, text) in conditions.items()
    }
    return tuple(c for _, c in sorted({**old, **made}.items()))


def _stalled(verdict: Verdict) -> tuple[bool, str, str]:
    """By kstatus a job that is Stalled has failed, so one that trains is not, whatever waits beside it."""
    if verdict.reason is ReadyReason.FAILED:
        return True, verdict.reason, verdict.message[:MAX_MESSAGE]
    if verdict.obstacle is None:
        return False, verdict.reason, "nothing waits for a person"
    if verdict.quorum is not None and verdict.quorum.reached:
        return False, verdict.reason, f"the job trains; {ConditionType.NEEDS_ATTENTION} says what waits for a person"
    return True, "Stalled", verdict.obstacle[:MAX_MESSAGE]


def _quorum(verdict: Verdict, world: World, ready: int) -> tuple[bool, str, str]:
    quorum = verdict.quorum or Quorum(False, f"{ready} of {world.size} workers are ready")
    return quorum.reached, quorum.reason if quorum.reached else "Waiting", quorum.message[:MAX_MESSAGE]


def _condition(
    old: Condition | None, type_: ConditionType, status: bool, reason: str, message: str, snapshot: Snapshot
) -> Condition:
    value = ConditionStatus.TRUE if status else ConditionStatus.FALSE
    same = old is not None and old.status == value
    return Condition(
        type=type_,
        status=value,
        reason=reason,
        message=message,
        last_transition_time=old.last_transition_time if old is not None and same else snapshot.now,
        observed_generation=snapshot.job.generation,
    )
