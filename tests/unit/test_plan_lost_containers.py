"""A worker whose container has ended once is lost, whatever the kubelet shows of it since."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.contract import labels
from everstep_local.plan.simulation.cluster import START
from everstep_operator.controller.observe import worker_pod
from everstep_operator.kube.wire import Pod
from everstep_operator.worker_pods import has_ended, has_started
from support.operator.kubelet_pods import BACKENDS, Json, a_world, act, ended, running, tell

CREATING: Json = {"waiting": {"reason": "ContainerCreating"}}
NOT_SEEN: Json = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
KILLED = ended(137, START)
FAILED = ended(1, START)
# What is told of the worker's container, and who pays for its end.
LOST: dict[str, tuple[Json, str]] = {
    "end not seen, shown as waiting": ({"state": CREATING, "lastState": NOT_SEEN, "restartCount": 1}, "infrastructure"),
    "end not seen, not counted": ({"state": CREATING, "lastState": NOT_SEEN, "restartCount": 0}, "infrastructure"),
    "end not seen, started again": ({"state": running(), "lastState": NOT_SEEN, "restartCount": 1}, "infrastructure"),
    "killed, started again": ({"state": running(), "lastState": KILLED, "restartCount": 1}, "infrastructure"),
    "failed, started again": ({"state": running(), "lastState": FAILED, "restartCount": 1}, "user_code"),
    "only counted, waits": ({"state": CREATING, "restartCount": 1}, "infrastructure"),
    "only counted, runs": ({"state": running(), "restartCount": 2}, "infrastructure"),
    "ended again": ({"state": FAILED, "lastState": NOT_SEEN, "restartCount": 1}, "infrastructure"),
    "ended with 0 then": ({"state": ended(0, START), "lastState": NOT_SEEN, "restartCount": 1}, "infrastructure"),
}


def shown(case: str) -> Json:
    told = LOST[case][0]
    return {"name": "worker", "ready": "running" in told["state"], "started": False, **told}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", LOST)
@pytest.mark.parametrize("phase", ["Running", "Pending", "Failed"])
def test_worker_whose_container_has_ended_once_is_replaced(backend: str, case: str, phase: str) -> None:
    world = a_world(backend)
    lost = world.current(1)
    tell(world, 1, running(), containerStatuses=[shown(case)], phase=phase)
    told = act(world)
    world.do_advance("10")
    act(world)
    restarts = world.status.restarts
    assert "WorkerLost: worker 1" in told
    assert (restarts.total, getattr(restarts, LOST[case][1])) == (1, 1), told
    assert lost not in world.pods
    assert len(world.pods) == 2


@pytest.mark.parametrize("case", LOST)
def test_container_that_has_ended_once_neither_starts_nor_joins(case: str) -> None:
    metadata = {"labels": {labels.WORKER_INDEX: "0", labels.INCARNATION: "0"}}
    body: dict[str, Any] = {"metadata": metadata, "status": {"phase": "Pending", "containerStatuses": [shown(case)]}}
    pod = msgspec.convert(body, Pod)
    seen = worker_pod(pod)
    assert has_ended(pod)
    assert has_started(pod)
    assert seen is not None
    assert (seen.starting, seen.waiting, seen.joining, seen.running) == (None, None, False, False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_side_car_that_is_started_again_costs_no_worker(backend: str) -> None:
    world = a_world(backend)
    worker = {"name": "worker", "ready": True, "state": running(), "restartCount": 0}
    mesh = {"name": "mesh", "ready": True, "state": running(), "lastState": KILLED, "restartCount": 3}
    tell(world, 1, running(), containerStatuses=[worker, mesh])
    act(world)
    assert world.status.restarts.total == 0
