"""Pods of a simulated job as the operator reads them from what a kubelet writes."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec

from everstep.contract import labels
from everstep_local.plan.simulation.agents import ElasticWorld
from everstep_local.plan.simulation.cluster import World
from everstep_operator.controller.observe import worker_pod
from everstep_operator.kube.wire import Pod, rfc3339

BACKENDS = ["everstep", "etcd", "c10d"]
Json = dict[str, Any]


def a_world(backend: str) -> Any:
    """Two workers, both needed, that have trained for a minute."""
    world: Any = World() if backend == "c10d" else ElasticWorld()
    if backend != "c10d":
        world.do_job("replicas=2")
        world.do_fixed()
    if backend == "etcd":
        world.do_etcd()
    act(world)
    world.do_ready("0", "1")
    if world.view is not None:
        world.do_form()
    world.do_step("5")
    act(world)
    world.do_advance("60")
    return world


def act(world: Any, passes: int = 3) -> str:
    return "\n".join(world.reconcile() for _ in range(passes))


def running() -> Json:
    return {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


def ended(code: int, at: datetime, reason: str = "") -> Json:
    reason = reason or ("Completed" if code == 0 else "Error")
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": rfc3339(at)}}


def container(name: str, state: Json) -> Json:
    return {"name": name, "state": state, "ready": "running" in state}


def tell(
    world: Any,
    index: int,
    worker: Json,
    side_cars: dict[str, Json] | None = None,
    *,
    native: dict[str, Json] | None = None,
    ephemeral: dict[str, Json] | None = None,
    deleted_at: datetime | None = None,
    spec: Json | None = None,
    **status: Any,
) -> None:
    """The pod of a worker becomes what the operator reads from this status, as a kubelet writes it."""
    old = world.pods[world.current(index)]
    containers = [container("worker", worker), *(container(n, s) for n, s in (side_cars or {}).items())]
    states = [c["state"] for c in containers]
    codes = [s["terminated"]["exitCode"] for s in states if "terminated" in s]
    phase = "Running" if len(codes) < len(states) else "Failed" if any(codes) else "Succeeded"
    all_ready = "True" if all(c["ready"] for c in containers) else "False"
    found = {labels.WORKER_INDEX: str(old.index), labels.INCARNATION: str(old.incarnation)}
    if old.round is not None:
        found[labels.ROUND] = str(old.round)
    metadata: Json = {"name": old.name, "uid": old.uid, "labels": found, "creationTimestamp": rfc3339(old.created_at)}
    if deleted_at is not None:
        stamp = rfc3339(deleted_at + timedelta(seconds=30))
        metadata |= {"deletionTimestamp": stamp, "deletionGracePeriodSeconds": 30}
    conditions = [{"type": t, "status": all_ready} for t in ("Ready", "ContainersReady")]
    told = {
        "phase": phase,
        "containerStatuses": containers,
        "initContainerStatuses": [container(n, s) for n, s in (native or {}).items()],
        "ephemeralContainerStatuses": [container(n, s) for n, s in (ephemeral or {}).items()],
        **status,
        "conditions": [*conditions, *status.get("conditions", ())],
    }
    body = {"metadata": metadata, "spec": {"nodeName": old.node, **(spec or {})}, "status": told}
    pod = worker_pod(msgspec.convert(body, Pod))
    assert pod is not None
    world.pods[old.name] = pod
