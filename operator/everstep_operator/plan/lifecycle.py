"""The end of a job: completion, deadlines, what is cleaned up, and when the job itself goes."""

from __future__ import annotations

from datetime import datetime, timedelta

from everstep_operator.api.conditions import ConditionStatus, ConditionType
from everstep_operator.api.status import Status
from everstep_operator.api.types import PodCleanup
from everstep_operator.plan import names
from everstep_operator.plan.actions import Action, DeleteJob, DeletePod, DeleteService, Plan, Requeue
from everstep_operator.plan.snapshot import Snapshot, WorkerPod

# A finished job's process has nothing left to save; the kubelet still gets to stop it in order.
FINISH_GRACE_SECONDS = 5


def is_finished(status: Status) -> bool:
    return any(
        c.status is ConditionStatus.TRUE and c.type in (ConditionType.COMPLETE, ConditionType.FAILED)
        for c in status.conditions
    )


def deadline(snapshot: Snapshot) -> datetime | None:
    """When `activeDeadlineSeconds` is over, counted from the first pass over the job."""
    seconds, start = snapshot.job.spec.active_deadline_seconds, snapshot.job.status.start_time
    return None if seconds is None or start is None else start + timedelta(seconds=seconds)


def clean_up(snapshot: Snapshot) -> tuple[Action, ...]:
    """What `podCleanup` says of the pods of a finished job."""
    policy = snapshot.job.spec.pod_cleanup
    if policy is PodCleanup.NONE:
        return ()
    doomed = (p for p in snapshot.pods if p.deleted_at is None and (policy is PodCleanup.ALL or not p.finished))
    actions: list[Action] = [_delete(p, f"the job is finished, podCleanup {policy}") for p in doomed]
    if snapshot.service_uid is not None:
        actions.append(
            DeleteService(names.service_name(snapshot.job.name), snapshot.service_uid, "the job is finished")
        )
    return tuple(actions)


def after_finish(snapshot: Snapshot) -> Plan:
    """A finished job: its status never changes again; pods and, after its time, the job itself are removed."""
    job = snapshot.job
    ttl, ended = job.spec.ttl_seconds_after_finished, job.status.completion_time
    if ttl is not None and ended is not None:
        due = ended + timedelta(seconds=ttl)
        if snapshot.now >= due:
            return Plan(job.status, (DeleteJob(job.uid, f"finished {ttl} s ago"),), reason="time to live is over")
        left = Requeue(due - snapshot.now, "time to live")
        return Plan(job.status, clean_up(snapshot), requeue=left, reason="finished; waits for its time to live")
    return Plan(job.status, clean_up(snapshot), reason="finished; nothing to do")


def _delete(pod: WorkerPod, why: str) -> DeletePod:
    return DeletePod(pod.name, pod.uid, FINISH_GRACE_SECONDS, why)
