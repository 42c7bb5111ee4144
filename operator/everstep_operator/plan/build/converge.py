"""From the pods that should exist to actions: delete superseded pods, create missing ones, report what blocks creation.

It does not know why a pod should exist. Invariants: what is taken away was named by the caller; what is created is made
at most so often a pass as the settings allow, and never before the back-off is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from everstep_operator.api.status import Status
from everstep_operator.plan import names
from everstep_operator.plan.actions import Action, CreatePod, CreateService, DeletePod
from everstep_operator.plan.build import finish, pods
from everstep_operator.plan.decide import restart_budget
from everstep_operator.plan.outcome import Requeue
from everstep_operator.plan.snapshot import Snapshot, WorkerPod
from everstep_operator.plan.stages import StageName
from everstep_operator.plan.state.losses import on_lost_node

# What a worker that is not wanted holds, the commit log or its peers hold too; its accelerators are needed at once.
SURVIVOR_GRACE_SECONDS = 1
REFUSED_RETRY = timedelta(seconds=15)


@dataclass(frozen=True, slots=True)
class Over:
    """A pod that must go, and how long it may take to end. `released`: it is healthy, and not wanted any more."""

    pod: WorkerPod
    why: str
    grace_seconds: int
    released: bool = False


@dataclass(frozen=True, slots=True)
class Carried:
    """`actions` by the stage that they belong to; `waits` is what is waited for, empty if nothing is."""

    actions: Mapping[StageName, Sequence[Action]]
    requeue: Requeue | None = None
    waits: str = ""


def carry(
    snapshot: Snapshot,
    wanted: Status,
    over: Iterable[Over],
    missing: Sequence[int],
    create: Callable[[int], CreatePod],
    *,
    workers: int,
) -> Carried:
    """`over` are pods that must go; `missing` are indices without a pod, of `workers`."""
    job = snapshot.job
    actions: dict[StageName, list[Action]] = {StageName.CLEAR: [], StageName.RELEASE: []}
    for one in over:
        if (removal := _remove(snapshot, one)) is not None:
            healthy = one.released and not one.pod.finished and not _is_lost(snapshot, one.pod)
            actions[StageName.RELEASE if healthy else StageName.CLEAR].append(removal)
    if snapshot.service_uid is None and workers > 0:
        service = CreateService(names.service_name(job.name), pods.service(job), "workers need host names")
        actions[StageName.NETWORK] = [service]
    if not missing:
        return Carried(actions)
    start = restart_budget.held_until(snapshot.now, job.spec.recovery, wanted.restarts)
    if start is not None:
        left = start - snapshot.now
        return Carried(actions, Requeue(left, "back-off"), f"backs off for {left.total_seconds():.0f} s")
    actions[StageName.CREATE] = [create(index) for index in missing[: snapshot.settings.max_pods_per_plan]]
    # Tried again in every pass, and after a while even if nothing is seen to change: what frees a name sends no event.
    if snapshot.name_collisions:
        taken = f"{snapshot.name_collisions[0]} is not ours"
        return Carried(actions, Requeue(REFUSED_RETRY, "name taken"), taken)
    if snapshot.create_refused is not None:
        return Carried(actions, Requeue(REFUSED_RETRY, "creates were refused"), "the API server refuses creates")
    return Carried(actions)


def or_deadline(snapshot: Snapshot, requeue: Requeue | None) -> Requeue | None:
    """When to look again if nothing else asks for it."""
    due = finish.deadline(snapshot)
    return Requeue(due - snapshot.now, "activeDeadlineSeconds") if requeue is None and due is not None else requeue


def _remove(snapshot: Snapshot, over: Over) -> DeletePod | None:
    """Take a pod away. On a lost node nobody would confirm it, so it is taken by force: what may still run there is
    fenced by the commit log."""
    pod = over.pod
    lost = _is_lost(snapshot, pod)
    if pod.deleted_at is not None and not lost:
        return None
    grace = 0 if lost or pod.finished else over.grace_seconds
    return DeletePod(pod.name, pod.uid, grace, f"node {pod.node} is lost" if lost else over.why)


def _is_lost(snapshot: Snapshot, pod: WorkerPod) -> bool:
    return on_lost_node(pod, snapshot.nodes, snapshot.now)


def blocked(snapshot: Snapshot, current: Mapping[int, WorkerPod]) -> str | None:
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
