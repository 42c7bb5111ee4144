"""The Ready condition of a job whose agents form the rounds: from what is known to the words of the STATUS column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from everstep_operator.api.conditions import ConditionType, ReadyReason
from everstep_operator.plan.build.converge import blocked
from everstep_operator.plan.build.status import Verdict
from everstep_operator.plan.decide import restart_budget
from everstep_operator.plan.outcome import Requeue
from everstep_operator.plan.snapshot import PodPhase, Snapshot, WorkerPod
from everstep_operator.plan.state import sizing
from everstep_operator.plan.state.roster import Roster
from everstep_operator.plan.state.world_state import Standing

# For so long a pod may find no node before that is said to be a lack of capacity: autoscalers take their time.
CAPACITY_PATIENCE = timedelta(seconds=30)


def trains(snapshot: Snapshot, seen: Standing) -> bool:
    """Whether the world is known to take steps, or cannot be known to."""
    reported = snapshot.progress
    if reported.updated_at is None or reported.round == 0:
        return True  # no reports, or of processes whose agent (stock torchrun) does not tell them their round
    since_loss = reported.trained_at is not None and (
        reported.lost_at is None or reported.trained_at > reported.lost_at
    )
    return since_loss and reported.round >= seen.round


def verdict(snapshot: Snapshot, wanted: Roster, current: Mapping[int, WorkerPod], seen: Standing) -> Verdict:
    """What the Ready condition says when nothing is being changed."""
    job = snapshot.job
    if wanted.wanted == 0:
        left = f"{len(snapshot.pods)} are ending" if snapshot.pods else "no workers"
        return Verdict(ReadyReason.SUSPENDED, f"spec.suspend is true: {left}", quorum=(False, "the job is suspended"))
    sizes = sizing.bounds(job.spec)
    before = job.status.condition(ConditionType.READY)
    reason_before = before.reason if before is not None else None
    ready = sum(p.ready and not p.finished for p in current.values())
    done = {i for i, p in current.items() if p.phase is PodPhase.SUCCEEDED}
    why = blocked(snapshot, current)
    said = why or _backs_off(snapshot, wanted, current)
    because = f": {said}" if said else ""
    stalled = why if why is not None and waited_long(snapshot, current) else None
    at_least = f", min {sizes.minimum}" if job.spec.elastic is not None else ""
    succeeded = f", {len(done)} succeeded" if done else ""
    training = max(0, seen.size - len(done & seen.members))
    if seen.stands:
        quorum = (True, f"{seen.size} workers train, of {wanted.wanted} wanted")
        full = seen.size >= wanted.wanted
        if reason_before in (ReadyReason.RECOVERING, ReadyReason.RESIZING) and not trains(snapshot, seen):
            message = f"{seen.size}/{wanted.wanted} in the round, waiting for the first step"
            return Verdict(ReadyReason(reason_before), message, quorum=quorum)
        if full:
            return Verdict(ReadyReason.RUNNING, f"{training}/{wanted.wanted} ready{succeeded}", quorum=quorum)
        message = f"{training}/{wanted.wanted} train{succeeded}{at_least}{because}"
        resizing = reason_before == ReadyReason.RESIZING and why is None
        reason = ReadyReason.RESIZING if resizing else ReadyReason.RUNNING_DEGRADED
        return Verdict(reason, message, stalled, quorum)
    message = f"{ready}/{wanted.wanted} ready{succeeded}{at_least}{because}"
    quorum = (False, message)
    if job.status.world.formed_at is None:
        reason = ReadyReason.WAITING_FOR_QUORUM if ready or done else ReadyReason.PENDING
    elif job.spec.elastic is not None and ready + len(done) < sizes.minimum:
        reason = ReadyReason.WAITING_FOR_QUORUM
    elif reason_before == ReadyReason.RESIZING:
        reason = ReadyReason.RESIZING
    else:
        reason = ReadyReason.RECOVERING
    return Verdict(reason, message, stalled, quorum)


def _backs_off(snapshot: Snapshot, wanted: Roster, current: Mapping[int, WorkerPod]) -> str | None:
    """That missing workers are created later, in words that stay the same until then."""
    job = snapshot.job
    start = restart_budget.held_until(snapshot.now, job.spec.recovery, job.status.restarts)
    if start is None or len(current) >= wanted.wanted:
        return None
    return f"no worker is created before {start:%H:%M:%S} UTC, after failures (back-off)"


def of_change(now: Verdict, reason: ReadyReason, message: str) -> Verdict:
    """The verdict on a roster that is being published. A loss of quorum is the graver news."""
    if reason is ReadyReason.RECOVERING and now.reason is ReadyReason.WAITING_FOR_QUORUM:
        return replace(now, message=message)
    return replace(now, reason=reason, message=message, stalled=None)


def starved(snapshot: Snapshot, current: Mapping[int, WorkerPod]) -> list[int]:
    """Workers that have found no node for longer than an autoscaler needs."""
    return [
        index
        for index, pod in sorted(current.items())
        if pod.unschedulable is not None
        and (pod.created_at is None or snapshot.now - pod.created_at >= CAPACITY_PATIENCE)
    ]


def waited_long(snapshot: Snapshot, current: Mapping[int, WorkerPod]) -> bool:
    """Whether what blocks is more than a pod that has just not found a node."""
    unscheduled = any(p.unschedulable is not None for p in current.values())
    refused = snapshot.name_collisions or snapshot.create_refused or any(p.waiting for p in current.values())
    return bool(refused) or (unscheduled and bool(starved(snapshot, current)))


def patience(snapshot: Snapshot, current: Mapping[int, WorkerPod]) -> Requeue | None:
    """When a pod that finds no node will have waited too long: nothing is seen to change then."""
    due = [
        pod.created_at + CAPACITY_PATIENCE - snapshot.now
        for pod in current.values()
        if pod.unschedulable is not None and pod.created_at is not None
    ]
    ahead = [left for left in due if left > timedelta(0)]
    return Requeue(min(ahead), "a worker finds no node") if ahead else None
