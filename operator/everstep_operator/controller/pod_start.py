"""Reads from a pod what keeps its worker from starting, and which of its init containers failed. Pure.

Each wait has a text, because a person who looks for the reason looks at the job first. What the kubelet reports only in
events, such as a volume that does not mount, `pod_events` reads.
"""

from __future__ import annotations

from everstep.contract import labels
from everstep_operator.kube.wire import Condition, ContainerStatus, ContainerTerminated, Pod
from everstep_operator.plan.snapshot import INIT_RUNS, InitFailure
from everstep_operator.worker_pods import has_started

MAX_WORDS = 300  # characters of a message
NOT_PREPARED = "ContainerCreating: its volumes and its network are not ready"
# Reasons for which a container waits until a person changes something.
_STUCK = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
    }
)


def stuck(pod: Pod) -> str | None:
    """Why a container cannot start, if that needs a person. Side-cars count until the worker has started."""
    if has_started(pod):
        return None
    kinds = [("init container ", s) for s in pod.status.init_container_statuses]
    kinds += [("container ", s) for s in pod.status.container_statuses]
    for kind, status in kinds:
        waiting = status.state.waiting
        if waiting is not None and waiting.reason in _STUCK:
            who = "" if status.name == labels.WORKER_CONTAINER else f"{kind}{status.name}: "
            return f"{who}{waiting.reason}: {_last_end(status) or waiting.message[:MAX_WORDS]}"
    return None


def starting(pod: Pod) -> str | None:
    """What the worker of a pod without a fault waits for; None once it has started."""
    if pod.status.phase not in ("", "Pending") or has_started(pod):
        return None
    conditions = {c.type: c for c in pod.status.conditions}
    if pod.spec.node_name == "":
        return _unplaced(conditions.get("PodScheduled"))
    for init in pod.status.init_container_statuses:
        # A native side-car that runs is ready; any other init container is ready when it has ended with 0.
        if init.state.running is not None and not init.ready:
            return f"{INIT_RUNS}{init.name} runs"
    sandbox = conditions.get("PodReadyToStartContainers")
    if sandbox is not None and sandbox.status == "False":
        return NOT_PREPARED
    worker = next((s for s in pod.status.container_statuses if s.name == labels.WORKER_CONTAINER), None)
    waiting = worker.state.waiting if worker is not None else None
    return waiting.reason or "its container waits" if waiting is not None else "its kubelet has not begun"


def init_failure(pod: Pod) -> InitFailure | None:
    """The init container that ended its pod. Restarts are off, so the first that failed is the last that ran.

    A native side-car, which stands among them, is killed when its pod ends: it never ends one.
    """
    if pod.status.phase != "Failed":
        return None
    native = {init.name for init in pod.spec.init_containers if init.restart_policy == "Always"}
    for status in pod.status.init_container_statuses:
        ended = status.state.terminated
        if ended is not None and ended.exit_code != 0 and not status.ready and status.name not in native:
            return InitFailure(
                status.name, ended.exit_code, ended.reason or None, ended.message or None, ended.finished_at
            )
    return None


def _unplaced(scheduled: Condition | None) -> str | None:
    if scheduled is None or scheduled.reason == "":
        return "no scheduler has looked at it"
    if scheduled.reason == "Unschedulable":
        return None  # it has words of its own
    return f"{scheduled.reason}: {scheduled.message[:MAX_WORDS]}"


def _last_end(status: ContainerStatus) -> str:
    """How a container ended that is started again and again."""
    ended: ContainerTerminated | None = status.last_state.terminated
    if ended is None:
        return ""
    lines = [line for line in ended.message.splitlines() if line.strip()]
    words = f": {lines[-1][:MAX_WORDS]}" if lines else ""
    return f"exit code {ended.exit_code} ({ended.reason or 'Error'}){words}"
