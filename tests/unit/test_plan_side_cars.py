"""A worker is judged by its own container and by why that ended, whatever its side-cars do."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from everstep.contract import labels
from everstep_local.plan.simulation.cluster import START
from everstep_operator.controller.observe import worker_pod
from everstep_operator.kube.wire import Pod, rfc3339
from everstep_operator.plan.actions import DeletePod
from everstep_operator.plan.planner import plan
from everstep_operator.worker_pods import stop_was_requested
from support.operator.kubelet_pods import BACKENDS, Json, a_world, act, ended, running, tell

# What else is in the pod while or after its worker ends; `None` in place of a code: it runs.
BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a side-car that runs": {"side_cars": {"mesh": None}},
    "a side-car that ended well": {"side_cars": {"mesh": 0}},
    "a side-car that failed": {"side_cars": {"mesh": 1}},
    "a side-car that was killed": {"side_cars": {"mesh": 137}},
    "two side-cars": {"side_cars": {"mesh": None, "logs": 137}},
    "a native side-car": {"native": {"mesh": None}},
    "a native side-car that was killed": {"native": {"mesh": 137}},
    "an ephemeral container": {"ephemeral": {"debugger": None}},
}


def beside(world: Any, which: str) -> dict[str, Any]:
    return {
        kind: {n: running() if code is None else ended(code, world.now) for n, code in found.items()}
        for kind, found in BESIDE[which].items()
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", BESIDE)
def test_job_whose_workers_ended_with_0_is_complete(backend: str, which: str) -> None:
    world = a_world(backend)
    for index in (0, 1):
        tell(world, index, ended(0, world.now), **beside(world, which))
    told = act(world)
    assert world.status.condition("Complete").status == "True", told
    assert (world.status.restarts.total, "WorkerLost" in told) == (0, False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", BESIDE)
@pytest.mark.parametrize(
    ("code", "reason", "cause", "charged"),
    [(1, "Error", "Error", 1), (137, "OOMKilled", "OOMKilled", 1), (137, "Error", "Signaled", 0)],
)
def test_worker_that_failed_is_replaced_at_once(
    backend: str, which: str, code: int, reason: str, cause: str, charged: int
) -> None:
    world = a_world(backend)
    lost = world.current(1)
    tell(world, 1, ended(code, world.now, reason), **beside(world, which))
    told = world.reconcile()
    assert f"worker 1 on n2 lost ({cause})" in told
    assert f"delete pod {lost}" in told
    assert (world.status.restarts.total, world.status.restarts.user_code) == (1, charged)
    world.do_advance("60")  # the back-off
    act(world)
    assert world.current(1) != lost
    assert world.current(1) in world.pods


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", BESIDE)
def test_worker_that_runs_is_not_lost_by_its_side_cars(backend: str, which: str) -> None:
    world = a_world(backend)
    tell(world, 1, running(), **beside(world, which))
    told = act(world)
    assert "WorkerLost" not in told
    assert world.status.condition("Ready").reason == "Running"
    assert world.status.ready_replicas == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_success_beside_a_killed_side_car_is_not_charged_while_the_other_runs(backend: str) -> None:
    world = a_world(backend)
    tell(world, 0, ended(0, world.now), {"mesh": ended(137, world.now)})
    told = act(world)
    assert "WorkerLost" not in told
    assert world.status.condition("Ready").message.endswith("1 succeeded")


def test_pod_with_a_side_car_gets_time_to_end_before_its_successor_is_placed() -> None:
    """A pod that is deleted by force is gone from the API while its containers still hold their devices."""
    world = a_world("everstep")
    pods = [world.current(0), world.current(1)]
    tell(world, 0, ended(1, world.now), {"mesh": running()})
    tell(world, 1, ended(1, world.now))
    deletes = {a.name: a for a in plan(world.snapshot()).actions if isinstance(a, DeletePod)}
    assert [deletes[name].grace_seconds for name in pods] == [1, 0]


@pytest.mark.parametrize("policy", ["Running", "None", "All"])
@pytest.mark.parametrize("code", [0, 1])
def test_side_cars_of_a_finished_job_end(policy: str, code: int) -> None:
    """They get their grace period to end by themselves, so that the logs stay; then their pod is deleted."""
    world = a_world("everstep")
    world.do_job(f"podCleanup={policy}", "recovery.maxRestarts=0")
    names = [world.current(0), world.current(1)]
    for index in (0, 1):
        tell(world, index, ended(code, world.now), {"mesh": running()})
    act(world, 1)
    ending = plan(world.snapshot())
    if policy == "All":
        assert not set(names) & set(world.pods)
        return
    assert set(names) <= set(world.pods)
    assert ending.requeue is not None
    assert ending.requeue.after == timedelta(seconds=30)
    tell(world, 0, ended(code, world.now), {"mesh": ended(0, world.now)})
    world.do_advance("31")
    act(world)
    assert set(names) & set(world.pods) == {names[0]}


# Who told the pod to end, as the pod shows: whether it is being deleted, the reason of its DisruptionTarget, and what
# the kubelet adds to its status. Without the first two nothing says when it was told.
TOLD: dict[str, tuple[bool, str | None, Json]] = {
    "deleted": (True, None, {}),
    "drained": (True, "EvictionByEvictionAPI", {}),
    "preempted": (False, "PreemptionByScheduler", {}),
    "evicted by the kubelet": (False, "TerminationByKubelet", {"phase": "Failed", "reason": "Evicted"}),
    "evicted by an older kubelet": (False, None, {"phase": "Failed", "reason": "Evicted"}),
    "node shut down": (False, "TerminationByKubelet", {"phase": "Failed", "reason": "Terminated"}),
    "node shut down by an older kubelet": (False, None, {"phase": "Failed", "reason": "NodeShutdown"}),
    "preempted by a static pod": (False, None, {"phase": "Failed", "reason": "Preempting"}),
    "deadline of the pod": (False, None, {"phase": "Failed", "reason": "DeadlineExceeded"}),
}
DATED = [who for who, (deleted, reason, _) in TOLD.items() if deleted or reason]


def stop_requested(who: str, at: datetime) -> Json:
    deleted, reason, status = TOLD[who]
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "lastTransitionTime": rfc3339(at)}
    return {**status, "deleted_at": at if deleted else None, "conditions": [condition] if reason else []}


@pytest.mark.parametrize("who", [*TOLD, "nobody", "its node was lost"])
def test_planner_and_round_store_agree_on_who_was_told_to_end(who: str) -> None:
    status = {"phase": "Failed", "reason": "NodeLost"} if who == "its node was lost" else {"phase": "Running"}
    deleted = who in TOLD and TOLD[who][0]
    if who in TOLD:
        status = {**status, **stop_requested(who, START)}
        status.pop("deleted_at")
    marks = {labels.WORKER_INDEX: "0", labels.INCARNATION: "0"}
    metadata = {"labels": marks, **({"deletionTimestamp": "2026-01-01T00:00:30Z"} if deleted else {})}
    pod = msgspec.convert({"metadata": metadata, "status": status}, Pod)
    seen = worker_pod(pod)
    assert seen is not None
    assert stop_was_requested(pod) is seen.stop_was_requested is (who in TOLD)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("who", TOLD)
@pytest.mark.parametrize("later", [0, 3])
def test_exit_0_of_a_pod_that_was_told_to_end_is_no_success(backend: str, who: str, later: int) -> None:
    """`trap 'exit 0' TERM`. In the same second it may be the answer too."""
    world = a_world(backend)
    at = world.now
    world.do_advance("5")
    for index in (0, 1):
        tell(world, index, ended(0, at + timedelta(seconds=later)), **stop_requested(who, at))
    told = act(world)
    assert world.status.condition("Complete").status == "False", told
    assert "WorkerLost" in told
    # The deadline is the only one of them that the template itself asks for.
    assert world.status.restarts.user_code == (1 if who == "deadline of the pod" else 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("who", DATED)
@pytest.mark.parametrize("side_cars", [None, {"mesh": 137}])
def test_exit_0_before_the_pod_was_told_to_end_is_a_success(
    backend: str, who: str, side_cars: dict[str, int] | None
) -> None:
    world = a_world(backend)
    at = world.now
    world.do_advance("5")
    beside = {n: ended(code, at) for n, code in (side_cars or {}).items()}
    for index in (0, 1):
        tell(world, index, ended(0, at - timedelta(seconds=1)), beside, **stop_requested(who, at))
    told = act(world)
    assert world.status.condition("Complete").status == "True", told


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("ended_after", "succeeded"), [(99, True), (100, False), (130, False)])
def test_deadline_of_the_template_takes_no_success_back(backend: str, ended_after: int, succeeded: bool) -> None:
    """A side-car kept the pod until then. The worker may have ended before, or in answer to it."""
    world = a_world(backend)
    at = world.now
    world.do_advance("140")
    for index in (0, 1):
        tell(
            world,
            index,
            ended(0, at + timedelta(seconds=ended_after)),
            {"mesh": ended(137, world.now)},
            spec={"activeDeadlineSeconds": 100},
            phase="Failed",
            reason="DeadlineExceeded",
            startTime=rfc3339(at),
        )
    told = act(world)
    assert (world.status.condition("Complete").status == "True") is succeeded, told
    assert world.status.restarts.user_code == (0 if succeeded else 1)


@pytest.mark.parametrize("who", DATED)
def test_failure_before_the_pod_was_told_to_end_is_charged(who: str) -> None:
    world = a_world("everstep")
    at = world.now
    world.do_advance("5")
    tell(world, 1, ended(1, at - timedelta(seconds=1)), {"mesh": ended(143, at)}, **stop_requested(who, at))
    world.reconcile()
    assert world.status.restarts.user_code == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_suspension_that_the_program_answers_with_0_is_no_success(backend: str) -> None:
    world = a_world(backend)
    kept = dict(world.pods)
    world.do_job("suspend=true")
    world.reconcile()
    world.pods = kept  # they end in their grace period
    for name in kept:
        world.change(name, deleted_at=world.now)
    for index in (0, 1):
        name = next(n for n, p in kept.items() if p.index == index)
        world.current = lambda _, name=name: name
        tell(world, index, ended(0, world.now + timedelta(seconds=1)), deleted_at=world.now)
        del world.current
    act(world)
    assert world.status.condition("Complete").status == "False"
    assert world.status.condition("Suspended").status == "True"


def test_node_that_is_lost_makes_a_ready_container_not_ready() -> None:
    """The node's controller writes only the Ready condition: no kubelet is there to write more."""
    world = a_world("everstep")
    tell(world, 1, running())
    assert world.pods[world.current(1)].ready
    conditions = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    tell(world, 1, running(), conditions=conditions)
    assert not world.pods[world.current(1)].ready
