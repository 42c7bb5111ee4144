"""What of a pod the planner is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.contract import labels
from everstep_operator.controller.observe import worker_pod
from everstep_operator.kube.wire import Pod
from everstep_operator.plan.times import FIRST, LAST


def test_evicted_pod_is_told_with_the_words_of_the_kubelet() -> None:
    found = {labels.WORKER_INDEX: "1", labels.INCARNATION: "2"}
    status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    pod = msgspec.convert({"metadata": {"name": "digits-w1-2", "uid": "u", "labels": found}, "status": status}, Pod)
    seen = worker_pod(pod)
    assert seen is not None
    assert (seen.index, seen.reason, seen.message) == (1, status["reason"], status["message"])


def pending(status: dict[str, Any], node: str = "n1") -> Any:
    found = {labels.WORKER_INDEX: "1", labels.INCARNATION: "2"}
    meta = {"name": "digits-w1-2", "uid": "u", "labels": found}
    body = {"metadata": meta, "spec": {"nodeName": node}, "status": {"phase": "Pending", **status}}
    return worker_pod(msgspec.convert(body, Pod))


def scheduled(status: str, reason: str = "", message: str = "") -> dict[str, Any]:
    return {"type": "PodScheduled", "status": status, "reason": reason, "message": message}


CREATING = {"name": "worker", "state": {"waiting": {"reason": "ContainerCreating"}}}
RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
SIDE_CAR = {"name": "proxy", "ready": True, "state": RUNNING}


@pytest.mark.parametrize(
    ("node", "status", "words"),
    [
        ("", {}, "no scheduler has looked at it"),
        ("", {"conditions": [scheduled("False", "SchedulingGated", "gates")]}, "SchedulingGated: gates"),
        ("", {"conditions": [scheduled("False", "Unschedulable", "0/2")]}, None),
        ("n1", {"containerStatuses": [CREATING]}, "ContainerCreating"),
        (
            "n1",
            {"containerStatuses": [CREATING], "conditions": [{"type": "PodReadyToStartContainers", "status": "False"}]},
            "ContainerCreating: its volumes and its network are not ready",
        ),
        ("n1", {"initContainerStatuses": [{"name": "fetch", "state": RUNNING}]}, "init container fetch runs"),
        ("n1", {"initContainerStatuses": [SIDE_CAR], "containerStatuses": [CREATING]}, "ContainerCreating"),
        ("n1", {}, "its kubelet has not begun"),
        ("n1", {"phase": "Running", "containerStatuses": [{"name": "worker", "state": RUNNING}]}, None),
    ],
)
def test_each_wait_of_a_worker_that_starts_has_words(node: str, status: dict[str, Any], words: str | None) -> None:
    assert pending(status, node).starting == words


def test_side_car_that_crashes_is_no_wait_of_a_worker_that_runs() -> None:
    crashing = {"name": "proxy", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    worker = {"name": "worker", "state": RUNNING}
    assert pending({"initContainerStatuses": [crashing]}).waiting.startswith("init container proxy: CrashLoopBackOff")
    assert pending({"initContainerStatuses": [crashing], "containerStatuses": [worker]}).waiting is None


def failed_init(name: str, code: int, at: str = "2026-01-01T00:00:09Z") -> dict[str, Any]:
    return {"name": name, "state": {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": at}}}


@pytest.mark.parametrize("first", ["mesh", "setup"])
def test_native_side_car_is_not_blamed_for_the_init_container_that_failed(first: str) -> None:
    """The kubelet kills it when its pod ends, in the same second."""
    found = {labels.WORKER_INDEX: "1", labels.INCARNATION: "2"}
    inits = [{"name": "mesh", "restartPolicy": "Always"}, {"name": "setup"}]
    ended = [failed_init("mesh", 137), failed_init("setup", 127)]
    order = 1 if first == "mesh" else -1
    body = {
        "metadata": {"name": "digits-w1-2", "uid": "u", "labels": found},
        "spec": {"nodeName": "n1", "initContainers": inits[::order]},
        "status": {"phase": "Failed", "initContainerStatuses": ended[::order]},
    }
    seen = worker_pod(msgspec.convert(body, Pod))
    assert seen is not None
    assert seen.init_failure is not None
    assert (seen.init_failure.container, seen.init_failure.code) == ("setup", 127)


@pytest.mark.parametrize("seconds", [10**12, 10**15, 2**63 - 1])
@pytest.mark.parametrize("deleted", ["2026-01-01T00:00:09Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"])
def test_times_at_the_ends_of_the_calendar_are_read(seconds: int, deleted: str) -> None:
    """`kubectl delete --grace-period` takes any number, and so does a pod's own deadline."""
    found = {labels.WORKER_INDEX: "1", labels.INCARNATION: "2"}
    meta = {"labels": found, "deletionTimestamp": deleted, "deletionGracePeriodSeconds": seconds}
    status = {"phase": "Failed", "reason": "DeadlineExceeded", "startTime": deleted}
    seen = worker_pod(
        msgspec.convert({"metadata": meta, "spec": {"activeDeadlineSeconds": seconds}, "status": status}, Pod)
    )
    assert seen is not None
    assert seen.deleted_at == FIRST
    assert seen.disrupted_at == LAST
