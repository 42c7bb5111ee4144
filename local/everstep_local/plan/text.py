"""Writes a plan as text: what the planner saw, what it decided and why, in the order in which an operator would act."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC
from typing import Any

from everstep_operator.api.conditions import ConditionType
from everstep_operator.api.status import Status
from everstep_operator.plan.outcome import Plan
from everstep_operator.plan.snapshot import Snapshot, WorkerPod
from everstep_operator.plan.state import roster


def as_text(snapshot: Snapshot, plan: Plan, cluster: str) -> str:
    """For people."""
    lines = [f"TrainingJob {snapshot.job.key} at {_time(snapshot)}" + (f" in {cluster}" if cluster else "")]
    lines += [f"  {line}" for line in _seen(snapshot)]
    lines += ["", f"Decision: {plan.reason}"]
    steps = list(_steps(snapshot, plan))
    if steps:
        lines += ["The operator would, in this order:", *(f"  {n}. {step}" for n, step in enumerate(steps, 1))]
    else:
        lines.append("The operator would change nothing.")
    if plan.requeue is not None:
        lines.append(f"It would plan again after {plan.requeue.after.total_seconds():g} s: {plan.requeue.why}.")
    return "\n".join(lines)


def as_json(snapshot: Snapshot, plan: Plan) -> dict[str, Any]:
    """For programs."""
    return {
        "job": snapshot.job.key,
        "takenAt": _time(snapshot),
        "reason": plan.reason,
        "publish": plan.publish,
        "status": plan.status.to_wire(),
        "stages": [
            {"name": str(s.name), "needs": sorted(map(str, s.needs)), "actions": [str(a) for a in s.actions]}
            for s in plan.stages
        ],
        "events": [str(event) for event in plan.events],
        "planAgainSeconds": plan.requeue.after.total_seconds() if plan.requeue is not None else None,
        "planAgainWhy": plan.requeue.why if plan.requeue is not None else None,
    }


def _time(snapshot: Snapshot) -> str:
    return snapshot.now.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _seen(snapshot: Snapshot) -> Iterator[str]:
    yield f"status: {_ready(snapshot.job.status)}"
    if not snapshot.pods:
        yield "no pods"
    yield from map(_pod, snapshot.pods)
    lost = sorted(node.name for node in snapshot.nodes.values() if not node.ready)
    if lost:
        yield f"nodes that are not Ready: {', '.join(lost)}"
    view = snapshot.world
    if view is not None and view.round == 0:
        yield "no round has formed yet"
    elif view is not None:
        parts = [f"round {view.round} of workers {_indices(index for index, _ in view.members)}"]
        parts += [f"no longer in it: {_indices(view.gone)}"] if view.gone else []
        parts += [f"waiting for the next: {_indices(view.joining)}"] if view.joining else []
        parts += [f"closed: {view.closed}"] if view.closed else []
        yield "; ".join(parts)


def _pod(pod: WorkerPod) -> str:
    parts = [f"pod {pod.name}: {pod.state}" + (", ready" if pod.ready else "")]
    parts += [f"on node {pod.node}"] if pod.node else []
    parts += ["being deleted"] if pod.deleted_at is not None else []
    if pod.exit is not None:
        parts.append(f"exit code {pod.exit.code}" + (f" ({pod.exit.reason})" if pod.exit.reason else ""))
    parts += [text for text in (pod.reason, pod.disruption, pod.waiting, pod.unschedulable) if text]
    return ", ".join(parts)


def _steps(snapshot: Snapshot, plan: Plan) -> Iterator[str]:
    old, new = snapshot.job.status, plan.status
    if new != old or plan.publish:
        yield f"write the status: {_ready(new)}{_published(old, new) if plan.publish else ''}"
    for stage in plan.stages:
        needs = f", unless a step of {' or '.join(sorted(stage.needs))} failed" if stage.needs else ""
        for action in stage.actions:
            yield f"{action} [{stage.name}{needs}]"
    for event in plan.events:
        yield f"record {event}"


def _published(old: Status, new: Status) -> str:
    if new.roster is not None and new.roster != old.roster:
        return f"; publish the workers {roster.from_status(new.roster)}, each as index@incarnation"
    if new.world.round != old.world.round:
        return f"; publish round {new.world.round} of {new.world.size} workers"
    return ""


def _ready(status: Status) -> str:
    ready = status.condition(ConditionType.READY)
    return "none yet" if ready is None else f'{ready.reason} "{ready.message}"'


def _indices(indices: Any) -> str:
    return ", ".join(map(str, sorted(indices)))
