"""A finished job runs again, whatever dies on the way: once, with its rounds and incarnations going on (ADR 0064)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep_local.plan.simulation.agents import ElasticWorld
from everstep_local.plan.simulation.cluster import Cut, World
from everstep_operator.api.conditions import ConditionType
from everstep_operator.plan.check import PlanError, check
from everstep_operator.plan.decide.completion import is_finished
from everstep_operator.plan.planner import plan
from everstep_operator.plan.render import rendezvous
from everstep_operator.plan.snapshot import JobView

cuts = st.builds(Cut, stage=st.integers(0, 3), done=st.integers(0, 63), fails=st.integers(0, 63), written=st.booleans())


def over(backend: str, *, failed: bool) -> Any:
    """A job that has ended, and whose pods are still there."""
    world = World() if backend == "c10d" else ElasticWorld()
    if backend == "etcd":
        world.do_etcd()  # type: ignore[attr-defined]
    world.spec["podCleanup"] = "None"
    world.spec["checkpoint"] = {"url": "s3://b/p"}
    world.do_rule("onReasons", "Error", "Fail")
    workers = [str(i) for i in range(int(world.spec["replicas"]))]  # type: ignore[call-overload]
    world.do_settle()
    world.do_ready(*workers)
    if backend == "everstep":
        world.do_form()  # type: ignore[attr-defined]
    world.do_settle()
    world.do_step("40")
    world.do_advance("60")
    if failed:
        world.do_fail("1")
    else:
        world.do_succeed(*workers)
    if backend == "everstep":
        world.do_close_for("a member has failed") if failed else world.do_close()  # type: ignore[attr-defined]
    world.do_settle()
    assert is_finished(world.status)
    return world


def names(world: Any) -> set[str]:
    return set(world.pods)


def view(world: Any) -> JobView:
    job: JobView = world.snapshot().job
    return job


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("backend", ["c10d", "everstep", "etcd"])
@settings(max_examples=15, deadline=None)
@given(dies=st.lists(cuts, max_size=6), linger=st.booleans(), stale=st.booleans())
def test_operator_that_dies_anywhere_begins_one_run_and_uses_no_name_twice(
    backend: str, failed: bool, dies: list[Cut], linger: bool, stale: bool
) -> None:
    world = over(backend, failed=failed)
    before, round_, ended = names(world), world.status.world.round, world.snapshot()
    world.spec["rerun"] = 3
    if linger:
        world.do_pods_linger()
    for cut in dies:
        world.apply(plan(world.snapshot()), cut)
        if linger:
            world.do_end()
    late = plan(world.snapshot())  # of an operator that lags
    for _ in range(8):
        world.reconcile()
        world.do_end()
    if stale:
        for stage in late.stages:
            for action in stage.actions:
                world.act(action)
        world.reconcile()
    assert not before & names(world), "a pod of the earlier run is there, or its name"
    workers = range(int(world.spec["replicas"]))
    world.do_ready(*map(str, workers))
    if backend == "everstep":
        world.do_form()
    world.do_settle()
    status = world.status
    assert status.condition(ConditionType.READY).reason == "Running"
    assert sorted(pod.index for pod in world.pods.values()) == list(workers)
    assert (status.rerun, [run.rerun for run in status.history]) == (3, [0])
    why = ended.job.status.condition(ConditionType.FAILED)
    assert status.history[0].outcome == (why.reason if failed and why is not None else "Complete")
    assert (status.history[0].step, status.progress.step, status.failure) == (40, None, None)
    assert status.completion_time is None
    assert status.world.round > round_ or backend == "etcd"
    assert plan(ended).status == ended.job.status, "without a higher value the job stays as it has ended"


def test_job_takes_the_value_that_it_is_created_with_and_history_is_bounded() -> None:
    world = World()
    world.spec["rerun"] = 7
    world.do_settle()
    assert (world.status.rerun, world.status.history) == (7, ())
    for rerun in range(8, 20):
        world.do_ready("0", "1")
        world.do_settle()
        world.do_succeed("0", "1")
        world.do_settle()
        world.spec["rerun"] = rerun
        world.do_settle()
    assert [run.rerun for run in world.status.history] == list(range(18, 8, -1))


def test_seconds_of_all_runs_are_the_jobs_and_the_deadline_is_the_present_runs() -> None:
    world = over("c10d", failed=True)
    world.do_advance("1000")  # nobody counts the time between two runs
    world.spec["rerun"] = 1
    world.do_settle()
    assert (world.status.earlier_active_seconds, world.status.history[0].active_seconds) == (60, 60)
    assert world.status.start_time == world.now


def test_commits_of_another_url_are_none_of_the_next_run() -> None:
    for url, step in (("s3://b/p", 30), ("s3://b/q", None)):
        world = over("c10d", failed=False)
        world.status = world.status.model_copy(
            update={"checkpoint": world.status.checkpoint.model_copy(update={"last_committed_step": 30})}
        )
        world.spec["rerun"], world.spec["checkpoint"] = 1, {"url": url}
        world.do_settle()
        assert (world.status.checkpoint.url, world.status.checkpoint.last_committed_step) == (url, step)


def test_agents_over_etcd_have_another_document_in_each_rerun_and_the_same_in_all_of_it() -> None:
    def run_id(world: Any) -> str:
        return rendezvous.of_agents(view(world), world.settings)["PET_RDZV_ID"]

    world = over("etcd", failed=False)
    assert run_id(world) == "uid-1"
    world.spec["rerun"] = 2
    world.do_settle()
    assert run_id(world) == "uid-1-2"
    fresh = ElasticWorld()
    fresh.do_etcd()
    fresh.spec["rerun"] = 5
    before = run_id(fresh)
    fresh.do_settle()
    assert before == run_id(fresh) == "uid-1-5"
    fresh.spec["rerun"] = 6  # an API server with an older CRD would take it
    fresh.do_settle()
    assert run_id(fresh) == "uid-1-5", "the workers of one world look in one place"


def test_document_that_the_api_server_refuses_and_a_node_that_does_not_answer_are_tried_again() -> None:
    """No change would be observed, and the job would never run again."""
    world = over("everstep", failed=False)
    world.spec["rerun"] = 1
    assert plan(world.snapshot()).requeue is None
    world.object_refused = "ConfigMap digits-rounds: exceeded quota"
    assert plan(world.snapshot()).requeue is not None
    assert "exceeded quota" in plan(world.snapshot()).reason
    waits = over("c10d", failed=True)
    waits.spec["rerun"] = 1
    waits.do_node_not_ready("n1")
    waits.do_pods_linger()
    assert plan(waits.snapshot()).requeue is not None


def test_plan_that_begins_a_job_anew_though_nobody_wants_it_is_refused() -> None:
    world = over("c10d", failed=False)
    snapshot = world.snapshot()
    world.spec["rerun"] = 1
    begun = plan(world.snapshot())
    with pytest.raises(PlanError, match="begins anew"):
        check(snapshot, begun)
