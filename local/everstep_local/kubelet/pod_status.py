"""Makes the status that a kubelet writes for a pod, from the states of its containers. Pure.

It follows the kubelet's `generateAPIPodStatus` for restartPolicy Never. Invariant: a condition's lastTransitionTime
changes only with its status. Conditions written by others (PodScheduled, DisruptionTarget) are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias, assert_never

from everstep_local.kubelet.sources import HOST_IP
from everstep_operator.kube.wire import rfc3339

MAX_MESSAGE = 4096  # bytes of a termination message, a kubelet's own bound


@dataclass(frozen=True, slots=True)
class Waiting:
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Running:
    started_at: datetime
    pid: int


@dataclass(frozen=True, slots=True)
class Terminated:
    """`exit_code` is 128 + n for signal n."""

    exit_code: int
    reason: str
    message: str
    started_at: datetime
    finished_at: datetime


ContainerState: TypeAlias = Waiting | Running | Terminated


@dataclass(frozen=True, slots=True)
class PodView:
    """All data for a status. `states` and `init_states` are by container name, in the spec's order."""

    states: Mapping[str, ContainerState]
    init_states: Mapping[str, ContainerState] = field(default_factory=dict)
    pod_ip: str = ""
    start_time: datetime | None = None
    # Set if the whole pod failed: DeadlineExceeded.
    reason: str = ""
    message: str = ""


def phase(view: PodView) -> str:
    """Pending until the last init container is done and all have been started; then by the exit codes."""
    inits = list(view.init_states.values())
    states = list(view.states.values())
    ended = [s for s in states if isinstance(s, Terminated)]
    if view.reason or any(isinstance(s, Terminated) and s.exit_code != 0 for s in inits):
        return "Running" if any(isinstance(s, Running) for s in (*inits, *states)) else "Failed"
    if any(isinstance(s, Waiting) for s in states):
        return "Pending"
    if len(ended) < len(states):
        return "Running"
    return "Failed" if any(s.exit_code != 0 for s in ended) else "Succeeded"


def pod_status(
    view: PodView,
    previous: Mapping[str, Any],
    containers: Sequence[Mapping[str, Any]],
    inits: Sequence[Mapping[str, Any]],
    now: datetime,
) -> dict[str, Any]:
    """The status to merge into `previous`."""
    now_phase = phase(view)
    status: dict[str, Any] = {
        "phase": now_phase,
        "conditions": _conditions(view, now_phase, previous.get("conditions") or (), now),
        "containerStatuses": [_container(c, view.states[str(c["name"])]) for c in containers],
        "hostIP": HOST_IP,
        "hostIPs": [{"ip": HOST_IP}],
    }
    if inits:
        status["initContainerStatuses"] = [_container(c, view.init_states[str(c["name"])]) for c in inits]
    if view.pod_ip:
        status |= {"podIP": view.pod_ip, "podIPs": [{"ip": view.pod_ip}]}
    if view.start_time is not None:
        status["startTime"] = previous.get("startTime") or rfc3339(view.start_time)
    if view.reason:
        status |= {"reason": view.reason, "message": view.message}
    return status


def _container(spec: Mapping[str, Any], state: ContainerState) -> dict[str, Any]:
    image = str(spec.get("image") or "")
    status: dict[str, Any] = {
        "name": spec["name"],
        "ready": False,
        "started": False,
        "restartCount": 0,
        "image": image,
        "imageID": "",
    }
    match state:
        case Waiting(reason, message):
            status["state"] = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        case Running(started_at, pid):
            status["state"] = {"running": {"startedAt": rfc3339(started_at)}}
            status |= {"ready": True, "started": True, "containerID": f"process://{pid}"}
        case Terminated():
            ended = {
                "exitCode": state.exit_code,
                "reason": state.reason,
                "startedAt": rfc3339(state.started_at),
                "finishedAt": rfc3339(state.finished_at),
            }
            if state.message:
                ended["message"] = state.message
            status["state"] = {"terminated": ended}
        case other:
            assert_never(other)
    return status


def _conditions(view: PodView, now_phase: str, previous: Sequence[Mapping[str, Any]], now: datetime) -> list[Any]:
    unready = sorted(name for name, state in view.states.items() if not isinstance(state, Running))
    if now_phase == "Succeeded":
        not_ready = ("PodCompleted", "")
    elif now_phase == "Failed":
        not_ready = ("PodFailed", "")
    else:
        not_ready = ("ContainersNotReady", f"containers with unready status: [{' '.join(unready)}]")
    initialized = all(isinstance(s, Terminated) and s.exit_code == 0 for s in view.init_states.values())
    sandbox = bool(view.pod_ip) and now_phase not in ("Succeeded", "Failed")
    wanted: list[tuple[str, bool, str, str]] = [
        ("PodReadyToStartContainers", sandbox, "", ""),
        ("Initialized", initialized, "" if initialized else "ContainersNotInitialized", ""),
        ("Ready", not unready, *(("", "") if not unready else not_ready)),
        ("ContainersReady", not unready, *(("", "") if not unready else not_ready)),
        ("PodScheduled", True, "", ""),
    ]
    before = {str(c.get("type")): c for c in previous}
    ours = [
        _condition(kind, "True" if true else "False", reason, message, before.get(kind), now)
        for kind, true, reason, message in wanted
    ]
    return ours + [dict(c) for kind, c in before.items() if kind not in {w[0] for w in wanted}]


def _condition(
    kind: str, status: str, reason: str, message: str, before: Mapping[str, Any] | None, now: datetime
) -> dict[str, Any]:
    condition: dict[str, Any] = {"type": kind, "status": status, "lastTransitionTime": rfc3339(now)}
    if before is not None and before.get("status") == status and before.get("lastTransitionTime"):
        condition["lastTransitionTime"] = before["lastTransitionTime"]
    if reason:
        condition["reason"] = reason
    if message:
        condition["message"] = message
    return condition
