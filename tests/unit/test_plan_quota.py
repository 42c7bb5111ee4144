"""What a queued job asks for, and gives back, is what Kueue can decide by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from everstep_local.plan.simulation.agents import ElasticWorld
from everstep_operator.plan.actions import CreateWorkload, ReturnQuota
from everstep_operator.plan.planner import plan


def trains_with_quota_for_two() -> ElasticWorld:
    world = ElasticWorld()
    for command in ("queue team", "reconcile", "admit 2 pool=a", "reconcile", "ready 0 1", "form", "settle"):
        world.run(command)
    return world


def asked(world: ElasticWorld) -> dict[str, Any]:
    (action,) = [each for each in plan(world.snapshot()).actions if isinstance(each, CreateWorkload)]
    return dict(action.body["spec"])


def test_larger_workload_that_is_admitted_elsewhere_is_deactivated_and_gives_its_quota_back() -> None:
    """A Kueue whose gate for replacements is off admitted it on other nodes. The smaller one was finished, and the pods
    that ran on were charged nowhere."""
    world = trains_with_quota_for_two()
    smaller = world.kueue.reserved()
    world.kueue.change(smaller, flavors=("a",))
    larger = world.kueue.pending()
    world.kueue.change(larger, flavors=("b",), assigned=3, admitted=True)
    for _ in range(3):
        world.run("reconcile")
    assert not world.kueue.workloads[larger.name].active
    world.kueue.change(world.kueue.workloads[larger.name], evicted="Deactivated")
    for _ in range(3):
        world.run("reconcile")
    kept, given = world.kueue.workloads[smaller.name], world.kueue.workloads[larger.name]
    assert (kept.charged, kept.finished, given.assigned) == (2, None, None)
    assert len(world.kueue.workloads) == 2, "no other one is asked for"
    assert len(world.pods) == 2


def test_larger_workload_has_the_priority_of_the_present_one() -> None:
    """With a higher one it evicted the Workload of its own job."""
    world = trains_with_quota_for_two()
    del world.kueue.workloads[world.kueue.pending().name]
    world.kueue.change(world.kueue.reserved(), priority=7)
    assert asked(world)["priority"] == 7
    assert "priorityClassRef" not in asked(world)


def test_reason_of_an_eviction_is_given_back_as_kueue_wrote_it() -> None:
    """A variable with a secret name whose value is a part of that word hid it, the API server refused what was left,
    and the quota of pods that were gone was never given back."""
    world = trains_with_quota_for_two()
    template = world.spec["template"]
    container = {**template["spec"]["containers"][0], "env": [{"name": "PASSWORD", "value": "Preem"}]}  # type: ignore[index]
    world.spec = {**world.spec, "template": {**template, "spec": {**template["spec"], "containers": [container]}}}  # type: ignore[index,dict-item]
    evicted = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "to make room"}
    world.kueue.change(
        world.kueue.reserved(), evicted="Preempted", evicted_message="to make room", conditions=(evicted,)
    )
    snapshot = world.snapshot()
    for _ in range(10):
        made = plan(snapshot)
        if back := [each for each in made.actions if isinstance(each, ReturnQuota)]:
            break
        world.run("reconcile")
        snapshot = world.snapshot()
        snapshot = replace(snapshot, pods=())
    (requeued,) = [each for each in back[0].status["conditions"] if each["type"] == "Requeued"]
    assert (requeued["reason"], requeued["status"]) == ("Preempted", "True")
    assert "Preem" not in back[0].why
