"""Plans for a finished job that is to run again: `spec.rerun` is above the value of the run that has ended (ADR 0064).

First the pods of the earlier run end. Then the document of rounds is begun anew, where the operator keeps it. Last the
status is published: finished no more, and without workers, which the next pass makes. Each step follows from what is
observed, so an operator may die between any two. Invariant: numbers of rounds and incarnations go on, and history has
each earlier run once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from everstep_operator import object_names
from everstep_operator.api.base import SAFE_INT_MAX
from everstep_operator.api.conditions import ConditionType, ReadyReason
from everstep_operator.api.events import EventReason
from everstep_operator.api.status import MAX_HISTORY, CheckpointStatus, EarlierRun, Progress, Restarts, Status
from everstep_operator.api.types import RendezvousBackend
from everstep_operator.plan.actions import Action, BeginRounds, DeletePod
from everstep_operator.plan.decide import suspend
from everstep_operator.plan.decide.decision import Publish
from everstep_operator.plan.outcome import Event, Plan, Requeue
from everstep_operator.plan.render import pods, workloads
from everstep_operator.plan.render.assembly import render_plan
from everstep_operator.plan.render.converge import REFUSED_RETRY
from everstep_operator.plan.snapshot import JobView, ReportedProgress, Snapshot, WorkerPod
from everstep_operator.plan.stages import StageName, staged
from everstep_operator.plan.state import facts, node_loss, sizing

MAX_MESSAGE = 256  # of the end of a run in the history


def is_wanted(job: JobView) -> bool:
    """Whether a finished job is to run again."""
    return job.spec.rerun > job.status.rerun


def begin(snapshot: Snapshot) -> Plan:
    """The next step towards another run of a finished job."""
    job = snapshot.job
    remaining = [pod for pod in snapshot.pods if not pod.over]
    if remaining:
        actions = [action for pod in remaining if (action := _end(snapshot, pod)) is not None]
        waiting = object_names.list_of_workers({pod.index for pod in remaining})
        reason = f"rerun: waits until the pods of {waiting} have ended"
        return _keep(job, reason, {StageName.CLEAN: actions}, _look_again(snapshot))
    if quota := workloads.finish(snapshot, succeeded=job.status.holds(ConditionType.COMPLETE)):
        return _keep(job, "rerun: waits until the quota of the earlier run is given back", {StageName.QUOTA: quota})
    if job.spec.rendezvous.backend is RendezvousBackend.EVERSTEP:
        if snapshot.world is None:
            return _keep(job, "rerun: waits until the document of rounds is read")
        if snapshot.world.closed is not None:
            sizes = sizing.present(job.spec, job.spec.replicas)
            rounds = BeginRounds(sizes, snapshot.world.round, "the job runs again")
            refused = snapshot.object_refused
            retry = Requeue(REFUSED_RETRY, "the document was refused") if refused is not None else None
            reason = f"rerun: begins the rounds anew{f': {refused}' if refused else ''}"
            return _keep(job, reason, {StageName.SIZES: [rounds]}, retry)
    return _publish(snapshot)


def _keep(
    job: JobView,
    reason: str,
    actions: Mapping[StageName, Collection[Action]] = MappingProxyType({}),
    requeue: Requeue | None = None,
) -> Plan:
    """The status stays that of the earlier run until the next one can begin."""
    return Plan(job.status, staged(actions), requeue=requeue, reason=reason)


def _look_again(snapshot: Snapshot) -> Requeue | None:
    """When a node counts as lost that does not answer: no change would be observed then."""
    due = [left for pod in snapshot.pods if (left := node_loss.until_lost(snapshot, pod)) is not None]
    return Requeue(min(due), "a node does not answer") if due else None


def _end(snapshot: Snapshot, pod: WorkerPod) -> DeletePod | None:
    """As after any loss of a node, nobody confirms there that a pod has ended. The commit log fences its processes."""
    lost = node_loss.is_lost(snapshot, pod)
    if pod.deleted_at is not None and not lost:
        return None
    grace = 0 if lost else pods.grace_seconds(snapshot.job)
    return DeletePod(pod.name, pod.uid, grace, f"node {pod.node} is lost" if lost else "the job runs again")


def _publish(snapshot: Snapshot) -> Plan:
    job = snapshot.job
    begun = replace(snapshot, job=replace(job, status=_begun(job)), progress=ReportedProgress())
    derived = facts.derive(begun)
    message = f"rerun {job.spec.rerun} begins"
    if job.spec.checkpoint is not None:
        message += f", from the newest commit at {job.spec.checkpoint.url}"
    event = Event(EventReason.JOB_RERUN, message)
    return render_plan(derived, Publish(suspend.no_workers(derived), message, ReadyReason.PENDING, event))


def _begun(job: JobView) -> Status:
    """The status of a job before the first pass of another run."""
    old, url = job.status, job.spec.checkpoint.url if job.spec.checkpoint is not None else None
    same = old.checkpoint.url == url
    ended = old.completion_time
    total = old.active_seconds(ended) if ended is not None else float(old.earlier_active_seconds)
    return old.model_copy(
        update={
            "rerun": job.spec.rerun,
            "history": (_earlier_run(old, total), *old.history)[:MAX_HISTORY],
            "start_time": None,
            "earlier_active_seconds": min(SAFE_INT_MAX, round(total)),
            "completion_time": None,
            "refused_since": None,
            "progress": Progress(),
            "checkpoint": old.checkpoint.model_copy(update={"skipped_saves": 0}) if same else CheckpointStatus(url=url),
            "restarts": Restarts(suspect_nodes=old.restarts.suspect_nodes),
            "recoveries": (),
            "failure": None,
        }
    )


def _earlier_run(old: Status, total: float) -> EarlierRun:
    failed = old.condition(ConditionType.FAILED) if old.holds(ConditionType.FAILED) else None
    end = failed or old.condition(ConditionType.COMPLETE)
    before = sum(run.active_seconds for run in old.history)
    return EarlierRun(
        rerun=old.rerun,
        outcome=failed.reason if failed is not None else ConditionType.COMPLETE,
        message=end.message[:MAX_MESSAGE] if end is not None else "",
        started_at=old.start_time,
        ended_at=old.completion_time,
        active_seconds=max(0, min(SAFE_INT_MAX, round(total) - before)),
        step=old.progress.step,
        committed_step=old.checkpoint.last_committed_step,
        restarts=old.restarts.total,
    )
