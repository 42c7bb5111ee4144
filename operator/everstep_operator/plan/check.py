"""Rules that no plan may break. The planner checks each plan against the snapshot from which it was made.

Tests show that the planner keeps these rules. This check is the last line of defence: a defect of the planner stops one
job with a clear error, and deletes no pods.
"""

from __future__ import annotations

from dataclasses import replace

from everstep_operator.api.status import Status
from everstep_operator.plan.actions import (
    Action,
    CreatePod,
    CreateWorkload,
    DeletePod,
    DeleteWorkload,
    FinishWorkload,
    ReclaimPods,
    ReturnQuota,
    forced_deletes,
)
from everstep_operator.plan.decide.completion import is_finished
from everstep_operator.plan.outcome import Plan
from everstep_operator.plan.render.workloads import REPLACES
from everstep_operator.plan.snapshot import Snapshot, WorkerPod
from everstep_operator.plan.stages import broken_rule
from everstep_operator.plan.state import admission, roster
from everstep_operator.plan.state.roster import Roster


class PlanError(Exception):
    """The planner broke one of its own rules; nothing of the plan was carried out."""


def check(snapshot: Snapshot, plan: Plan) -> None:
    """Raise PlanError for the first broken rule."""
    old, new = snapshot.job.status, plan.status
    if (wrong := broken_rule(plan.stages)) is not None:
        raise PlanError(wrong)
    created = [a for a in plan.actions if isinstance(a, CreatePod)]
    deleted = [a for a in plan.actions if isinstance(a, DeletePod)]
    if new.world.round < old.world.round:
        raise PlanError(f"round goes back from {old.world.round} to {new.world.round}")
    if is_finished(old) and created:
        raise PlanError("a finished job is given pods")
    if is_finished(old) and is_finished(new) and _result(new) != _result(old):
        raise PlanError("a finished job is given another status")
    if is_finished(old) and not is_finished(new) and not old.rerun < new.rerun == snapshot.job.spec.rerun:
        raise PlanError(f"a finished job of rerun {old.rerun} begins anew as rerun {new.rerun}")
    if is_finished(new) and created:
        raise PlanError("a job is finished and given pods in one plan")
    if len({c.name for c in created}) != len(created) or len({d.uid for d in deleted}) != len(deleted):
        raise PlanError("a pod is created or deleted twice in one plan")
    ours = {p.uid: p for p in snapshot.pods}
    doomed = []
    for delete in deleted:
        pod = ours.get(delete.uid)
        if pod is None or pod.name != delete.name:
            raise PlanError(f"{delete.name} ({delete.uid}) is not a pod of this job")
        if not is_finished(new):
            doomed.append(pod)
    _check_roster(snapshot, plan, created, doomed)
    _check_quota(snapshot, plan, created)


def _check_quota(snapshot: Snapshot, plan: Plan, created: list[CreatePod]) -> None:
    """Check that a queued job gets pods by an admission alone, and that quota is given back only without pods."""
    queue = snapshot.queue
    if queue is None:
        return
    workload = None if queue.unread is not None else admission.reserved(queue)
    if created:
        if workload is None or not workload.admitted or workload.evicted is not None:
            raise PlanError(f"a job that queue {queue.name} has not admitted is given pods")
        made = roster.published(replace(snapshot.job, status=plan.status)) or roster.empty(snapshot.job)
        if len(made.workers) > workload.charged + made.surge:
            raise PlanError(f"workers {made} have quota for {workload.charged} pods")
        gone = forced_deletes(plan.actions)
        left = sum(not pod.over and pod.uid not in gone for pod in snapshot.pods)
        if left + len(created) > workload.charged + made.surge:
            raise PlanError(f"{len(created)} pods beside {left} that are alive have quota for {workload.charged}")
    alive = [pod.name for pod in snapshot.pods if not pod.over]
    for action in plan.actions:
        gives_all = isinstance(action, ReturnQuota | FinishWorkload) and (
            workload is None or action.name == workload.name
        )
        of_reserved = isinstance(action, DeleteWorkload) and workload is not None and action.uid == workload.uid
        if alive and (gives_all or of_reserved or _is_first(action)):
            raise PlanError(f"{action}, while pod {alive[0]} is alive")
        if isinstance(action, ReclaimPods) and workload is not None:
            kept = workload.count - action.status["reclaimablePods"][0]["count"]
            if not len(alive) <= kept < workload.charged:
                raise PlanError(f"{action}, with quota for {workload.charged} pods and {len(alive)} alive")


def _is_first(action: Action) -> bool:
    """Whether this asks for quota that is to replace none."""
    return isinstance(action, CreateWorkload) and REPLACES not in action.body["metadata"]["annotations"]


def _result(status: Status) -> Status:
    """What may not change once a job is finished: all but the generation that was seen, and the count of its pods."""
    seen = tuple(c.model_copy(update={"observed_generation": None}) for c in status.conditions)
    return status.model_copy(update={"replicas": 0, "observed_generation": None, "conditions": seen})


def _check_roster(snapshot: Snapshot, plan: Plan, created: list[CreatePod], doomed: list[WorkerPod]) -> None:
    """Check that created and deleted pods follow from the published roster."""
    job = snapshot.job
    old = roster.published(job)
    made = roster.published(replace(job, status=plan.status))
    empty = roster.empty(job)
    if _incarnations(made) != _incarnations(old) and not plan.publish:
        raise PlanError(f"workers {made} are not published in place of {old}")
    if old is not None and made is None:
        raise PlanError("the published workers are taken back")
    if old is not None and made is not None:
        _check_successor(old, made)
    made = made or empty
    _check_round(snapshot, plan, made)
    for create in created:
        worker = made.workers.get(create.index)
        if worker is None or create.incarnation != worker.number:
            raise PlanError(f"{create.name} is not one of the published workers {made}")
    for pod in doomed:
        if not made.supersedes(job.name, pod) and pod.index not in made.leaving:
            raise PlanError(f"{pod.name} is one of the published workers {made}, or of later ones")


def _incarnations(published: Roster | None) -> dict[int, int] | None:
    return None if published is None else {index: worker.number for index, worker in published.workers.items()}


def _check_round(snapshot: Snapshot, plan: Plan, made: Roster) -> None:
    """Check the round's number. Under c10d the published roster is the round; with the other backends the agents form
    it."""
    before, number = snapshot.job.status.world.round, plan.status.world.round
    seen = snapshot.progress.round if snapshot.world is None else snapshot.world.round
    if made.replaces_all:
        if number != before and not plan.publish:
            raise PlanError(f"round {number} is not published as the successor of {before}")
    elif number not in (before, seen):
        raise PlanError(f"round {number} is neither published nor formed: {before}, {seen}")


def _check_successor(old: Roster, made: Roster) -> None:
    if made.next_incarnation < old.next_incarnation:
        raise PlanError(f"incarnations go back from {old.next_incarnation} to {made.next_incarnation}")
    for index, worker in made.workers.items():
        least = old.workers[index].number if index in old.workers else old.next_incarnation
        if worker.number < least:
            raise PlanError(f"worker {index} goes back to incarnation {worker.number}, at least {least} is expected")
