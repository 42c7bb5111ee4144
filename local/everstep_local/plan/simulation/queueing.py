"""The Workloads of a simulated job, and commands that play Kueue's part: it admits, evicts and says why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

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
from everstep_operator.plan.render.workloads import MADE_FROM, REPLACES
from everstep_operator.plan.snapshot import PodChanges, QueueView, WorkloadView
from everstep_operator.plan.state import admission

if TYPE_CHECKING:
    from everstep_local.plan.simulation.cluster import World


class Kueue:
    """What the planner sees of it. `name`: of the queue on the job's label."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self.now = now
        self.name: str | None = None
        self.workloads: dict[str, WorkloadView] = {}
        self.changes = PodChanges()
        self.versions = 0
        self.obstacle: str | None = None
        self.unread: str | None = None
        self.refusal: str | None = None

    def view(self) -> QueueView | None:
        workloads = tuple(sorted(self.workloads.values(), key=lambda each: each.number))
        view = QueueView(
            self.name,
            () if self.unread else workloads,
            changes=self.changes,
            obstacle=self.obstacle,
            unread=self.unread,
            refusal=self.refusal,
        )
        return None if self.name is None and not admission.unfinished(view) else view

    def change(self, workload: WorkloadView, **fields: Any) -> None:
        self.versions += 1
        self.workloads[workload.name] = replace(workload, version=str(self.versions), **fields)

    def pending(self) -> WorkloadView:
        """The one that waits for quota."""
        view = self.view()
        waiting = None if view is None else admission.pending(view)
        if waiting is None:
            raise ValueError("no Workload waits for quota")
        return waiting

    def reserved(self) -> WorkloadView:
        view = self.view()
        having = None if view is None else admission.reserved(view)
        if having is None:
            raise ValueError("no Workload has quota")
        return having

    def act(self, action: Action) -> None:
        """Carry out a write, if the Workload is as the plan saw it."""
        if isinstance(action, CreateWorkload):
            self._create(action)
            return
        if not isinstance(
            action, PatchWorkload | DeleteWorkload | ReturnQuota | ReclaimPods | SetPodsReady | FinishWorkload
        ):
            return
        known = self.workloads.get(action.name)
        if known is None or known.version != action.version:
            return
        match action:
            case PatchWorkload(_, _, body):
                self.change(known, **_requested(body))
            case DeleteWorkload():
                del self.workloads[action.name]
            case ReclaimPods():
                self.change(known, reclaimable=action.status["reclaimablePods"][0]["count"])
            case ReturnQuota():
                conditions = tuple(action.status["conditions"])
                self.change(
                    known, assigned=None, admitted=False, reclaimable=0, pods_ready=False, conditions=conditions
                )
            case SetPodsReady():
                (ready,) = [each for each in action.status["conditions"] if each["type"] == "PodsReady"]
                self.change(known, pods_ready=ready["status"] == "True")
            case FinishWorkload():
                self.change(known, finished=action.why)

    def _create(self, action: CreateWorkload) -> None:
        if action.name in self.workloads:
            return
        self.versions += 1
        annotations = action.body["metadata"]["annotations"]
        replaces = annotations.get(REPLACES, "").rpartition("/")[2] or None
        number = int(action.name.rpartition("-")[2])
        uid = f"q{self.versions}"
        made = WorkloadView(
            action.name, uid, str(self.versions), number, "", 0, replaces=replaces, created_at=self.now()
        )
        self.workloads[action.name] = replace(made, **_requested(action.body))


def _requested(body: dict[str, Any]) -> dict[str, Any]:
    spec = body["spec"]
    if "podSets" not in spec:
        return {"active": spec["active"]}
    (pod_set,) = spec["podSets"]
    return {
        "queue": spec["queueName"],
        "count": pod_set["count"],
        "minimum": pod_set.get("minCount"),
        "priority": spec["priority"],
        "made_from": body["metadata"]["annotations"][MADE_FROM],
    }


def queue(world: World, name: str = "") -> None:
    """The label of the job; without an argument it is taken off."""
    world.kueue.name = name or None


def admit(world: World, count: str, *node_labels: str) -> None:
    """There is quota for so many pods, on nodes with these labels."""
    selector = dict(label.split("=") for label in node_labels)
    world.kueue.changes = PodChanges(node_selector=selector)
    waiting = world.kueue.pending()
    world.kueue.change(waiting, assigned=int(count), admitted=True, evicted=None, evicted_message="", waits="")


def replaced(world: World) -> None:
    """Kueue has ended the smaller Workload, and not yet admitted the larger one."""
    kueue = world.kueue
    smaller = kueue.workloads[str(kueue.pending().replaces)]
    kueue.change(smaller, finished=admission.REPLACED, finished_at=world.now)


def admit_larger(world: World) -> None:
    """There is quota for the larger Workload."""
    count = world.kueue.pending().count
    replaced(world)
    admit(world, str(count))


def node_selector(world: World, label: str) -> None:
    """The template asks for nodes with this label."""
    key, _, value = label.partition("=")
    template = copy.deepcopy(world.spec["template"])
    template["spec"]["nodeSelector"] = {key: value}  # type: ignore[index]
    world.spec = {**world.spec, "template": template}


def ignore_queue(world: World, name: str) -> None:
    """The job has the label of a queue, and the operator obeys none."""
    world.ignored_queue = name


def evict_workload(world: World, reason: str = "Preempted", message: str = "to make room") -> None:
    """The quota is wanted back; it is taken as long as the operator does not give it back."""
    world.kueue.change(world.kueue.reserved(), evicted=reason, evicted_message=message)


def workload_waits(world: World, message: str, reason: str = "Pending") -> None:
    world.kueue.change(world.kueue.pending(), waits=message, inadmissible=reason == "Inadmissible")


def reserve(world: World, count: str) -> None:
    """There is quota for so many pods, and an admission check is not done."""
    world.kueue.change(world.kueue.pending(), assigned=int(count), waits="")


def workload_inactive(world: World) -> None:
    world.kueue.change(world.kueue.pending(), active=False)


def workload_gone(world: World) -> None:
    """Somebody has deleted it."""
    del world.kueue.workloads[world.kueue.reserved().name]


def queue_lacks(world: World, what: str = "") -> None:
    """No pods can be made for what is admitted; without an argument they can."""
    world.kueue.obstacle = what or None


def workloads_unread(world: World, why: str = "") -> None:
    world.kueue.unread = why or None


def workload(world: World) -> str:
    """The Workloads of the job, and what they are charged."""
    return "\n".join(_described(each) for each in world.kueue.workloads.values()) or "no workload"


def pod_selector(world: World) -> str:
    return "\n".join(f"{name}: {selector}" for name, selector in sorted(world.selectors.items()))


def _described(each: WorkloadView) -> str:
    asks = str(each.count) if each.minimum is None else f"{each.minimum} to {each.count}"
    quota = f"charged {each.charged}" if each.assigned is not None else "no quota"
    requeued = next((c for c in each.conditions if c["type"] == "Requeued"), None)
    parts = [f"{each.name}: asks queue {each.queue} for {asks}, {quota}"]
    parts += [] if each.active else ["inactive"]
    parts += [f"finished {each.finished}"] if each.finished is not None else []
    parts += [f"pods ready {each.pods_ready}"] if each.pods_ready is not None else []
    parts += [f"requeued {requeued['status']} {requeued['reason']}"] if requeued is not None else []
    return ", ".join(parts)


QUEUEING: dict[str, Callable[..., str | None]] = {
    "queue": queue,
    "admit": admit,
    "replaced": replaced,
    "admit-larger": admit_larger,
    "node-selector": node_selector,
    "ignore-queue": ignore_queue,
    "evict-workload": evict_workload,
    "workload-waits": workload_waits,
    "reserve": reserve,
    "workload-inactive": workload_inactive,
    "workload-gone": workload_gone,
    "queue-lacks": queue_lacks,
    "workloads-unread": workloads_unread,
    "workload": workload,
    "pod-selector": pod_selector,
}
