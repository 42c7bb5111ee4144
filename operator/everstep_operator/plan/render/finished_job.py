"""Plans for the end of a job: its last status, what is cleaned up, and when the job itself is deleted."""

from __future__ import annotations

from datetime import datetime

from everstep_operator import object_names
from everstep_operator.api.conditions import ConditionType, ReadyReason
from everstep_operator.api.events import EventReason
from everstep_operator.api.status import Failure, Status
from everstep_operator.api.types import PodCleanup, SuccessPolicy
from everstep_operator.plan import times
from everstep_operator.plan.actions import Action, DeleteJob, DeletePod, DeleteService
from everstep_operator.plan.decide.decision import Failed
from everstep_operator.plan.outcome import Event, LostWorker, Plan, Requeue
from everstep_operator.plan.render import disruption_budget, job_status, network_policy, pod_group, pods, workloads
from everstep_operator.plan.render.job_status import Verdict
from everstep_operator.plan.snapshot import JobView, Snapshot, WorkerPod
from everstep_operator.plan.stages import Stage, StageName, staged

# A finished job's process has nothing left to save, unless it served worker 0. The kubelet still gets the time to stop
# it in order.
FINISH_GRACE_SECONDS = 5


def complete(snapshot: Snapshot, message: str) -> Plan:
    """The job is complete. `message` says which of its workers succeeded."""
    done = job_status.render(
        snapshot,
        Verdict(ReadyReason.COMPLETE, message),
        world=snapshot.job.status.world,
        existing=0,
        ready=0,
        finished_at=snapshot.now,
    )
    event = Event(EventReason.JOB_COMPLETED, message)
    stages = clean_up(snapshot, is_complete=True)
    return Plan(done, stages, (event,), _side_cars_may_end(snapshot), publish=True, reason=message)


def fail(snapshot: Snapshot, failed: Failed) -> Plan:
    """The job ends here. Its status keeps the root cause, if a worker was lost."""
    loss = failed.loss
    message = f"{failed.reason}: {failed.message}"[: job_status.MAX_MESSAGE]
    failure = None
    if loss is not None:
        failure = Failure(
            cause=loss.cause,
            message=message,
            at=loss.at or snapshot.now,
            worker=loss.index,
            pod=loss.pod,
            node=loss.node,
            exit_code=loss.exit_code,
            log_lines=loss.log_lines,
        )
    ended = job_status.render(
        snapshot,
        Verdict(ReadyReason.FAILED, message, failed=failed.reason),
        world=snapshot.job.status.world,
        existing=0,
        ready=0,
        failure=failure,
        finished_at=snapshot.now,
    )
    # An event shows its reason beside its message, so the message does not repeat it.
    event = Event(failed.event, failed.message if str(failed.reason) == str(failed.event) else message)
    return Plan(
        ended,
        clean_up(snapshot, is_complete=False),
        (event,),
        _side_cars_may_end(snapshot),
        lost=None if loss is None else LostWorker(loss.cause, loss.node),
        publish=True,
        reason=message,
    )


def clean_up(snapshot: Snapshot, *, is_complete: bool) -> tuple[Stage, ...]:
    """Delete the pods of a finished job that `podCleanup` names, and pods in which only side-cars run. Where worker 0
    decides, the others of a complete job may wait for it for ever, so they end even if `podCleanup` names none."""
    ends_others = is_complete and snapshot.job.spec.success_policy is SuccessPolicy.WORKER_0
    quota = workloads.finish(snapshot, succeeded=is_complete)
    return staged({StageName.CLEAN: _clean_up_actions(snapshot, ends_others), StageName.QUOTA: quota})


def _clean_up_actions(snapshot: Snapshot, ends_others: bool) -> tuple[Action, ...]:
    policy = snapshot.job.spec.pod_cleanup
    actions: list[Action] = []
    for pod in snapshot.pods:
        if pod.deleted_at is not None or (pod.over and policy is not PodCleanup.ALL):
            continue
        if policy is not PodCleanup.ALL and pod.finished:
            if _side_cars_end_by(snapshot, pod) <= snapshot.now:
                actions.append(_delete(pod, "the job is finished, and only side-cars still run"))
        elif ends_others and not pod.finished:
            grace = pods.grace_seconds(snapshot.job)
            actions.append(_delete(pod, "worker 0 succeeded, which completes the job", grace))
        elif policy is not PodCleanup.NONE:
            actions.append(_delete(pod, f"the job is finished, podCleanup {policy}"))
    if policy is not PodCleanup.NONE and snapshot.service_uid is not None:
        actions.append(
            DeleteService(object_names.service_name(snapshot.job.name), snapshot.service_uid, "the job is finished")
        )
    others = (module.deletion(snapshot) for module in (disruption_budget, network_policy, pod_group))
    return (*actions, *(action for deletions in others for action in deletions))


def _side_cars_end_by(snapshot: Snapshot, pod: WorkerPod) -> datetime:
    """Until when the side-cars of an ended worker may end by themselves, which keeps the pod and its logs. The kubelet
    gives native side-cars the pod's grace period; other containers may watch the worker."""
    ended = pod.exit.finished_at if pod.exit is not None else None
    if ended is None:
        return snapshot.now
    # No worker ends after its job. Its node's clock may be ahead.
    ended = min(ended, snapshot.job.status.completion_time or snapshot.now)
    return times.after(ended, pods.grace_seconds(snapshot.job))


def _side_cars_may_end(snapshot: Snapshot) -> Requeue | None:
    """When to look for side-cars that have not ended. No change would be observed then."""
    if snapshot.job.spec.pod_cleanup is PodCleanup.ALL:
        return None
    ends = (_side_cars_end_by(snapshot, p) for p in snapshot.pods if p.finished and not p.over and p.deleted_at is None)
    due = min((at for at in ends if at > snapshot.now), default=None)
    return None if due is None else Requeue(due - snapshot.now, "side-cars may end by themselves")


def after_finish(snapshot: Snapshot) -> Plan:
    """The plan for a finished job: its pods are removed, and after its time to live the job. Its result never changes
    again. If somebody has edited it, the status has the new generation, and an event explains that the edit has no
    effect."""
    job = snapshot.job
    ttl, ended = job.spec.ttl_seconds_after_finished, job.status.completion_time
    status_, events = _after_edit(job)
    requeue, reason = _side_cars_may_end(snapshot), "finished; nothing to do"
    if ttl is not None and ended is not None:
        due = times.after(ended, ttl)
        if snapshot.now >= due:
            end = staged({StageName.END: (DeleteJob(job.uid, f"finished {ttl} s ago"),)})
            return Plan(job.status, end, reason="time to live is over")
        left = Requeue(due - snapshot.now, "time to live")
        requeue = requeue if requeue is not None and requeue.after < left.after else left
        reason = "finished; waits for its time to live"
    stages = clean_up(snapshot, is_complete=job.status.holds(ConditionType.COMPLETE))
    return Plan(status_, stages, events, requeue, reason=reason)


def _after_edit(job: JobView) -> tuple[Status, tuple[Event, ...]]:
    """The status of a finished job with its present generation, and the event that an edit does nothing. An operator of
    before may have counted its pods."""
    old = job.status
    seen = tuple(c.model_copy(update={"observed_generation": job.generation}) for c in old.conditions)
    made = old.model_copy(update={"replicas": 0, "observed_generation": job.generation, "conditions": seen})
    if old.observed_generation in (None, job.generation):
        return made, ()
    ready = old.condition(ConditionType.READY)
    text = (
        f"the job is {ready.reason if ready is not None else 'finished'}: of its spec only podCleanup and "
        f"ttlSecondsAfterFinished still have an effect; to run it again, set spec.rerun to {old.rerun + 1} or more"
    )
    return made, (Event(EventReason.EDIT_WITHOUT_EFFECT, text),)


def _delete(pod: WorkerPod, why: str, grace: int = FINISH_GRACE_SECONDS) -> DeletePod:
    return DeletePod(pod.name, pod.uid, grace, why)
