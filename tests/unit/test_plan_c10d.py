"""Under c10d a roster is replaced as a whole, whatever is wrong with it (ADR 0027)."""

from __future__ import annotations

from typing import Any

import pytest

from everstep_local.plan.simulation import agents as elastic_world
from everstep_local.plan.simulation import cluster as plan_world
from everstep_operator.api.status import Status
from everstep_operator.plan.actions import DeletePod
from everstep_operator.plan.planner import plan

ETCD = {"backend": "etcd", "etcd": {"endpoints": ["http://etcd:2379"]}}


def trains(world: Any) -> Any:
    """The world with two workers that run."""
    world.do_job("replicas=2")
    world.do_settle()
    world.do_ready("0", "1")
    world.do_settle()
    return world


def loses_worker_one(world: Any) -> Any:
    world.do_advance("60")
    world.do_fail("1", "137")
    world.do_settle()
    world.do_ready("0", "1")
    world.do_settle()
    return world


def test_status_that_somebody_edited_back_is_followed_by_a_round_newer_than_all_pods() -> None:
    world = trains(plan_world.World())
    old = world.status
    loses_worker_one(world)
    assert sorted(world.pods) == ["digits-w0-1", "digits-w1-1"]
    world.status = old
    world.do_settle()
    assert world.status.world.round == 3
    assert sorted(world.pods) == ["digits-w0-2", "digits-w1-2"]


def test_status_emptied_while_suspended_takes_no_number_twice() -> None:
    world = loses_worker_one(trains(plan_world.World()))
    world.status = Status()
    world.do_job("suspend=true")
    world.do_settle()
    assert not world.pods
    world.do_job("suspend=false")
    world.do_settle()
    assert sorted(world.pods) == ["digits-w0-2", "digits-w1-2"]
    assert world.status.world.round == 3


@pytest.mark.parametrize("passes_while_suspended", [0, 1, 2])
@pytest.mark.parametrize(("before", "after"), [({"backend": "c10d"}, ETCD), (ETCD, {"backend": "c10d"})])
def test_backend_that_was_changed_gets_pods_of_its_own_with_names_of_their_own(
    before: dict[str, Any],
    after: dict[str, Any],
    passes_while_suspended: int,
) -> None:
    """The API server allows the change while `spec.suspend` is true, also if the operator has not seen that yet."""
    world = plan_world.World() if before["backend"] == "c10d" else elastic_world.ElasticWorld()
    world.spec.pop("elastic", None)
    world.spec["rendezvous"], world.view = before, None
    trains(world)
    names = set(world.pods)
    world.do_job("suspend=true")
    for _ in range(passes_while_suspended):
        world.do_settle()
        world.spec["rendezvous"] = after if passes_while_suspended == 2 else before
    world.do_job("suspend=false")
    world.spec["rendezvous"] = after
    for _ in range(3):
        world.do_settle()
        world.do_advance("10")
    labelled = {pod.round is not None for pod in world.pods.values()}
    assert labelled == {after["backend"] == "c10d"}
    assert len(world.pods) == 2
    assert not names & set(world.pods)


def test_plan_made_of_an_old_view_of_the_roster_deletes_nothing_without_publishing() -> None:
    world = trains(plan_world.World())
    old = world.snapshot().job
    loses_worker_one(world)
    newer = world.snapshot()
    stale = type(newer)(newer.now, old, newer.pods, newer.service_uid, newer.nodes)
    decided = plan(stale)
    assert decided.publish or not [a for a in decided.actions if isinstance(a, DeletePod)]


@pytest.mark.parametrize("backend", [{"backend": "c10d"}, ETCD], ids=["c10d", "etcd"])
def test_recovery_that_a_suspension_cut_short_is_not_timed(backend: dict[str, Any]) -> None:
    world = plan_world.World() if backend["backend"] == "c10d" else elastic_world.ElasticWorld()
    world.spec.pop("elastic", None)
    world.spec["rendezvous"], world.view = backend, None
    trains(world)
    world.do_advance("60")
    world.do_fail("1", "137")
    world.do_settle()
    world.do_job("suspend=true")
    world.do_settle()
    world.do_advance("86400")
    world.do_job("suspend=false")
    world.do_settle()
    world.do_ready("0", "1")
    world.do_settle()
    world.do_step("5")
    world.do_settle()
    assert world.status.condition("Ready").reason == "Running"  # type: ignore[arg-type]
    assert world.status.recoveries[0].first_step_ms is None
    assert world.status.recoveries[0].rendezvous_ms is None
