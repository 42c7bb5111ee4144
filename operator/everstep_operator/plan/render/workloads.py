"""What the operator writes into the Workloads of a queued job (ADR 0068).

Kueue decides by a Workload, and everything that it decides is read from there (`state.admission`). Ordering duties:
what adds to the pods follows from an observed admission; what takes quota off the job follows from the observed absence
of pods, and never comes in the pass that deletes them. Each write is one compare-and-swap, so an operator may die
between any two, or see an old Workload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, assert_never

from everstep.contract import labels
from everstep_operator import object_names
from everstep_operator.plan.actions import (
    Action,
    CreateWorkload,
    DeleteWorkload,
    FinishWorkload,
    PatchWorkload,
    ReclaimPods,
    ReturnQuota,
    SetPodsReady,
)
from everstep_operator.plan.snapshot import JobView, QueueView, Snapshot, WorkloadView
from everstep_operator.plan.stages import StageName
from everstep_operator.plan.state import admission, charged, sizing
from everstep_operator.plan.state.admission import Admitted, Leaving, NotQueued, Waiting
from everstep_operator.plan.state.facts import Facts

POD_SET = "workers"
API_VERSION = f"{charged.KUEUE}v1beta2"
MADE_FROM = f"{labels.GROUP}/made-from"  # an annotation: see `charged.made_from`
_JOB_UID = f"{charged.KUEUE}job-uid"  # a label by which Kueue finds the Workload of a job
# Kueue puts a Workload that was evicted for another reason back into its queue by itself: after its back-off, when the
# queue is started again, or when somebody activates the Workload.
_QUEUED_AGAIN = ("Preempted", "NodeFailures")
# Annotations of Workloads that a larger one may replace, and of the larger one.
_ELASTIC, REPLACES = f"{charged.KUEUE}elastic-job", f"{charged.KUEUE}workload-slice-replacement-for"
_MAX_NAME = 63  # Kueue writes it into a label


def actions(facts: Facts) -> Mapping[StageName, Sequence[Action]]:
    queue = facts.snapshot.queue
    if queue is None or queue.unread is not None:
        return {}
    alive = any(not pod.over for pod in facts.snapshot.pods)
    if facts.job.spec.suspend:
        leave = [] if alive else [_delete(each, "spec.suspend is true") for each in admission.unfinished(queue)]
        return {StageName.QUOTA: leave}
    match facts.admission:
        case NotQueued():
            return {}
        case Waiting():
            return {} if alive else _ask(facts.job, queue)
        case Leaving(why, workload, again):
            # First what asks for more: else it would be admitted by itself, for all of its pods.
            if asking := admission.asking(queue, workload):
                return {StageName.ADMISSION: [_delete(each, why) for each in asking]}
            if alive or workload is None:
                return {}
            back = _return(facts, workload) if again else _delete(workload, why)
            return {StageName.QUOTA: [back]}
        case Admitted(_, workload):
            return {} if workload is None else _keep(facts, queue, workload)
        case other:
            assert_never(other)


def finish(snapshot: Snapshot, *, succeeded: bool) -> list[Action]:
    """The end of the Workload of a finished job whose pods have ended."""
    queue = snapshot.queue
    if queue is None or any(not pod.over for pod in snapshot.pods):
        return []
    reason = "Succeeded" if succeeded else "Failed"
    finished = (f"the job has {reason.lower()}", ("Finished", True, reason))
    return [
        FinishWorkload(each.name, each.version, _conditions(snapshot.now, each, *finished), reason)
        for each in admission.unfinished(queue)
    ]


def _ask(job: JobView, queue: QueueView) -> Mapping[StageName, Sequence[Action]]:
    """Ask for quota: one Workload, for all pods that the spec wants."""
    workload = admission.pending(queue)
    if admission.reserved(queue) is not None:
        return {}
    if queue.name is None:
        return {} if workload is None else {StageName.QUOTA: [_delete(workload, "the label of its queue was removed")]}
    if queue.refusal is not None or charged.refusal(job.spec) is not None:
        return {}
    count = sizing.wanted(job.spec) + sizing.spares(job.spec)
    least = sizing.bounds(job.spec).minimum
    minimum = least if least < count else None
    if workload is None:
        number = 1 + max((each.number for each in queue.workloads), default=0)
        name = name_of(job, number)
        elastic = {} if job.spec.elastic is None else {_ELASTIC: "true"}
        body = {**_identity(job, name, elastic), "spec": _spec(job, queue, count, minimum)}
        asks = object_names.number_of_pods(count) if minimum is None else f"{minimum} to {count} pods"
        return {StageName.ADMISSION: [CreateWorkload(name, body, f"queue {queue.name}, {asks}")]}
    requested = (workload.queue, workload.count, workload.minimum, workload.priority, workload.made_from)
    wanted = (queue.name, count, minimum, queue.priority, charged.made_from(job.spec))
    if requested == wanted:
        return {}
    body = {
        "metadata": {"annotations": {MADE_FROM: charged.made_from(job.spec)}},
        "spec": {"priorityClassRef": None, **_spec(job, queue, count, minimum)},
    }
    return {StageName.ADMISSION: [PatchWorkload(workload.name, workload.version, body, "the job was edited")]}


def _keep(facts: Facts, queue: QueueView, workload: WorkloadView) -> Mapping[StageName, Sequence[Action]]:
    """What is written while the job has quota: whether its pods are ready, and which of them it needs no more."""
    now = facts.snapshot.now
    made: dict[StageName, list[Action]] = {StageName.ADMISSION: [], StageName.QUOTA: []}
    # A round that may run counts, not all pods: a job that recovers must not be evicted for it.
    reached = facts.world.has_quorum and facts.roster.wanted > 0
    # Kueue ends the smaller Workload as it admits the larger one, and another write between fails that.
    unanswered = any(map(admission.is_unanswered, admission.asking(queue, workload)))
    if reached != bool(workload.pods_ready) and not unanswered:
        reason, text = ("Started", "the workers train") if reached else ("WaitForRecovery", "too few workers train")
        status = _conditions(now, workload, text, ("PodsReady", reached, reason))
        made[StageName.ADMISSION].append(SetPodsReady(workload.name, workload.version, status, text))
    made[StageName.ADMISSION] += _grow(facts, queue, workload)
    alive = sum(not pod.over for pod in facts.snapshot.pods)
    spec, quota = facts.job.spec, workload.charged
    needed = max(sizing.wanted(spec, quota) + sizing.spares(spec, quota), len(facts.roster.workers), alive)
    if needed < quota and not unanswered and not made[StageName.ADMISSION]:  # another write would be a conflict
        status = {"reclaimablePods": [{"name": POD_SET, "count": workload.count - needed}]}
        why = f"{object_names.number_of_pods(needed)} of {quota} are needed"
        made[StageName.QUOTA].append(ReclaimPods(workload.name, workload.version, status, why))
    made[StageName.QUOTA] += [_delete(each, "it is over") for each in queue.workloads if each.finished is not None]
    elsewhere = admission.elsewhere(queue, workload)
    for each in elsewhere:
        if each.evicted is not None:
            made[StageName.QUOTA].append(_return(facts, each))
        elif each.active:  # it stays in its queue, so that no other one is asked for
            inactive = {"metadata": {"annotations": {MADE_FROM: each.made_from}}, "spec": {"active": False}}
            why = "its quota is on other nodes than those on which the job trains"
            made[StageName.ADMISSION].append(PatchWorkload(each.name, each.version, inactive, why))
    # A Kueue that knows no replacement leaves it to us.
    replaced = [each for each in admission.unfinished(queue) if each.assigned is not None and each is not workload]
    over = ("a larger Workload has replaced it", ("Finished", True, admission.REPLACED))
    made[StageName.QUOTA] += [
        FinishWorkload(each.name, each.version, _conditions(now, each, *over), admission.REPLACED)
        for each in replaced
        if each.number < workload.number and workload.admitted and each not in elsewhere
    ]
    return made


def _grow(facts: Facts, queue: QueueView, workload: WorkloadView) -> list[Action]:
    """Ask for the next size: one larger Workload at a time, in place of the present one."""
    job, count = facts.job, admission.next_count(facts.snapshot, workload)
    if asking := admission.asking(queue, workload):
        other = [each for each in asking if (each.count, each.replaces) != (count, workload.name)]
        if other:
            return [_delete(each, "another number of pods is wanted") for each in other]
        forgotten = [each for each in asking if admission.is_forgotten(facts.snapshot, each)]
        return [_delete(each, "Kueue has not answered") for each in forgotten]
    if count is None or queue.refusal is not None or workload.evicted or admission.elsewhere(queue, workload):
        return []
    name = name_of(job, 1 + max(each.number for each in queue.workloads))
    replaces = {_ELASTIC: "true", REPLACES: f"{job.namespace}/{workload.name}"}
    body = {**_identity(job, name, replaces), "spec": _larger(job, queue, workload, count)}
    why = f"queue {queue.name}, {object_names.number_of_pods(count)} in place of {workload.charged}"
    return [CreateWorkload(name, body, why)]


def _larger(job: JobView, queue: QueueView, workload: WorkloadView, count: int) -> dict[str, Any]:
    """What a larger Workload asks for in place of the present one, whose pods run on. A Kueue whose gate for
    replacements is off does not know that: with a higher priority it would evict the present one for it."""
    if queue.priority != workload.priority:
        queue = replace(queue, priority=workload.priority, priority_class=None)
    return _spec(job, queue, count, None)


def _return(facts: Facts, workload: WorkloadView) -> ReturnQuota:
    """Kueue waits for this write, and admits nobody else before it. With `reclaimablePods` the next request would be a
    smaller one."""
    # As Kueue has written it: what is shown has no secrets, and a part of this word may look like one.
    reason = next((str(e["reason"]) for e in workload.conditions if e.get("type") == "Evicted"), str(workload.evicted))
    if reason.startswith("Deactivated"):  # with its cause; Kueue looks for the word alone when it is activated again
        reason = "Deactivated"
    again = reason in _QUEUED_AGAIN
    status = _conditions(
        facts.snapshot.now,
        workload,
        workload.evicted_message or reason,
        ("QuotaReserved", False, "Pending"),
        ("Admitted", False, "NoReservation"),
        ("PodsReady", False, "WaitForStart"),
        ("Requeued", again, reason),
    )
    status.update({"admission": None, "reclaimablePods": None})
    queued = "queued again" if again else "Kueue queues it again"
    return ReturnQuota(workload.name, workload.version, status, f"{workload.evicted}: all pods are gone, {queued}")


def _conditions(now: datetime, workload: WorkloadView, message: str, *changed: tuple[str, bool, str]) -> dict[str, Any]:
    """The status with these conditions, each by its type, status and reason."""
    conditions = {str(each.get("type")): dict(each) for each in workload.conditions}
    at = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for kind, holds, reason in changed:
        value = "True" if holds else "False"
        before = conditions.get(kind, {})
        since = before.get("lastTransitionTime", at) if before.get("status") == value else at
        conditions[kind] = {
            "type": kind, "status": value, "reason": reason, "message": message[:1024], "lastTransitionTime": since,
        }  # fmt: skip
    return {"conditions": list(conditions.values())}


def _delete(workload: WorkloadView, why: str) -> DeleteWorkload:
    return DeleteWorkload(workload.name, workload.uid, workload.version, why)


def name_of(job: JobView, number: int) -> str:
    ending = f"-{job.uid.replace('-', '')[:8]}-{number}"
    return f"{job.name[: _MAX_NAME - len(ending)].rstrip('-.')}{ending}"


def _identity(job: JobView, name: str, annotations: Mapping[str, str]) -> dict[str, Any]:
    ours = object_names.metadata(name, job.name, job.namespace, job.uid)
    return {
        "apiVersion": API_VERSION,
        "kind": "Workload",
        "metadata": {
            **ours,
            "labels": {**ours["labels"], _JOB_UID: job.uid},
            "annotations": {**annotations, MADE_FROM: charged.made_from(job.spec)},
        },
    }


def _spec(job: JobView, queue: QueueView, count: int, minimum: int | None) -> dict[str, Any]:
    least = {} if minimum is None else {"minCount": minimum}
    priority_class = {} if queue.priority_class is None else {"priorityClassRef": dict(queue.priority_class)}
    return {  # not `active`, which is true in a new one: somebody may have deactivated it
        "queueName": queue.name,
        "priority": queue.priority,
        **priority_class,
        "podSets": [{"name": POD_SET, "count": count, **least, "template": charged.template(job.spec)}],
    }
