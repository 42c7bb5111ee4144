"""A job whose training has ended is Complete, whatever happens to its pods, spec and operator in that moment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from everstep_local.plan.simulation import agents as elastic_world
from everstep_local.plan.simulation import cluster as plan_world
from everstep_operator.plan.actions import CreatePod
from everstep_operator.plan.planner import plan

PASSES = 5
WORKERS = 4
index = st.integers(0, WORKERS - 1)
# What comes in the moment of the end. `act` is a pass of the operator.
late = st.one_of(
    st.tuples(st.sampled_from(["succeed", "succeed", "gone", "evict", "delete", "fail"]), index),
    st.tuples(st.just("scale"), st.integers(2, 6)),
    st.tuples(st.just("suspend"), st.booleans()),
    st.tuples(st.just("node"), st.booleans()),
    st.tuples(st.just("act")),
    st.tuples(st.just("act")),
)


class Ending:
    """A job that trains, and what happens to it at its end; `made` are the pods that the operator created meanwhile."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.made: list[str] = []
        world.do_job(f"replicas={WORKERS}", "recovery.maxRestarts=50", "recovery.noProgressLimit=1000")
        self.act(3)
        world.do_ready(*map(str, range(WORKERS)))
        if world.view is not None:
            world.do_form()
        self.act()
        world.do_advance("60")
        self.made.clear()

    def act(self, passes: int = 1) -> None:
        for _ in range(passes):
            decided = plan(self.world.snapshot())
            self.made += [a.name for a in decided.actions if isinstance(a, CreatePod)]
            self.world.apply(decided)

    def do(self, verb: str, *args: Any) -> None:
        match verb, args:
            case "act", _:
                self.act()
            case "scale", (replicas,):
                self.world.spec["replicas"] = replicas
            case "suspend", (suspended,):
                self.world.spec["suspend"] = suspended
            case "node", (ready,):
                (self.world.do_node_back if ready else self.world.do_node_lost)("n2")
            case _, (worker,):
                self.to_pod(verb, worker)

    def to_pod(self, verb: str, worker: int) -> None:
        pod = self.world.pods.get(self.world.current(worker))
        if pod is None or (pod.finished and verb not in ("gone", "delete")):
            return
        more = ("137",) if verb == "fail" else ()
        getattr(self.world, f"do_{verb}")(str(worker), *more)

    def rest_succeeds(self) -> None:
        self.world.pods = {n: p for n, p in self.world.pods.items() if p.deleted_at is None}
        for pod in list(self.world.pods.values()):
            if not pod.finished and self.world.current(pod.index) == pod.name:
                self.world.do_succeed(str(pod.index))

    def is_complete(self) -> bool:
        complete = self.world.status.condition("Complete")
        return complete is not None and complete.status == "True"

    def expect_complete_without_new_pods(self, after: list[tuple[Any, ...]]) -> None:
        """Whatever comes `after`, while the rest of the workers succeed."""
        self.made.clear()
        for name, *args in after:
            self.do(name, *args)
        self.rest_succeeds()
        self.act(PASSES)
        assert self.is_complete(), self.world.status.condition("Ready")
        assert not self.made


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(before=st.lists(late, max_size=3), after=st.lists(late, max_size=12))
def test_job_whose_agents_have_finished_is_complete_without_new_pods(
    before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]
) -> None:
    """`before` comes while the last agent tells of its success, and `after` when all have."""
    ending = Ending(elastic_world.ElasticWorld())
    for name, *args in before:
        ending.do(name, *args)
    ending.world.do_close()
    ending.expect_complete_without_new_pods(after)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(late, max_size=6), st.lists(late, max_size=6))
def test_job_whose_operator_begins_at_the_end_is_complete(
    unread: list[tuple[Any, ...]], after: list[tuple[Any, ...]]
) -> None:
    """It adds nobody once it sees a success; of a job that shows none, it learns the end when it reads the round."""
    ending = Ending(elastic_world.ElasticWorld())
    ending.world.do_close()
    ending.world.do_operator_restart()
    for name, *args in unread:
        successes = any(p.phase == "Succeeded" for p in ending.world.pods.values())
        made = len(ending.made)
        ending.do(name, *args)
        wanted = not ending.world.spec.get("suspend") and ending.world.published().wanted > 0
        assert len(ending.made) == made or not (successes and wanted)
    ending.world.do_round_read()
    ending.expect_complete_without_new_pods(after)


@pytest.mark.parametrize("backend", ["everstep", "etcd", "c10d"])
@pytest.mark.parametrize("fixed", [False, True])
@settings(max_examples=25, deadline=None)
@given(replicas=st.integers(2, 8), suspend=st.booleans(), restarted=st.booleans(), deleted=st.sets(index))
def test_job_whose_published_workers_have_all_succeeded_is_complete_without_new_pods(
    backend: str,
    fixed: bool,
    replicas: int,
    suspend: bool,
    restarted: bool,
    deleted: set[int],
) -> None:
    """Nothing but the pods tells of the end; they are being deleted, and the spec was changed before it was seen."""
    world: Any = plan_world.World() if backend == "c10d" else elastic_world.ElasticWorld()
    if backend == "etcd":
        world.do_etcd()
    if backend != "c10d" and fixed:
        world.do_fixed()
    ending = Ending(world)
    world.do_succeed(*map(str, range(WORKERS)))
    world.do_advance("1")  # in the same second they might have ended because they were told to
    for worker in deleted:
        world.do_delete(str(worker))
    world.do_job(f"replicas={replicas}", f"suspend={str(suspend).lower()}")
    if restarted and backend == "everstep":
        world.do_operator_restart()
    ending.act()
    assert ending.is_complete(), world.status.condition("Ready")
    assert not ending.made


@pytest.mark.parametrize("backend", ["everstep", "etcd", "c10d"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(before=st.lists(late, max_size=6), after=st.lists(late, max_size=8), restarted=st.booleans())
def test_job_whose_worker_0_decides_and_succeeds_is_complete_and_ends_the_others(
    backend: str, before: list[tuple[Any, ...]], after: list[tuple[Any, ...]], restarted: bool
) -> None:
    world: Any = plan_world.World() if backend == "c10d" else elastic_world.ElasticWorld()
    if backend == "etcd":
        world.do_etcd()
    ending = Ending(world)
    world.do_job("successPolicy=Worker0", "podCleanup=None")
    for name, *args in before:
        ending.do(name, *args)
    first = world.pods.get(world.current(0))
    assume(first is not None and not first.finished and not first.stop_was_requested)
    others = [i for i in range(1, WORKERS) if (pod := world.pods.get(world.current(i))) and not pod.succeeded]
    assume(others and not ending.is_complete())
    world.do_succeed("0")
    for worker in others[1:]:
        ending.to_pod("fail", worker)
    if restarted and backend == "everstep":
        world.do_operator_restart()
    charged = world.status.restarts.total
    ending.made.clear()
    ending.act()
    assert ending.is_complete(), world.status.condition("Ready")
    for name, *args in after:
        ending.do(name, *args)
    ending.act(PASSES)
    assert ending.is_complete()
    assert (ending.made, world.status.restarts.total) == ([], charged)
    assert all(pod.finished or pod.deleted_at is not None for pod in world.pods.values())


@pytest.mark.parametrize("backend", ["everstep", "etcd", "c10d"])
def test_pods_that_have_ended_are_not_counted_ready(backend: str) -> None:
    world: Any = plan_world.World() if backend == "c10d" else elastic_world.ElasticWorld()
    if backend == "etcd":
        world.do_etcd()
    ending = Ending(world)
    world.do_succeed("0", "1", "2")
    ending.act()
    assert world.status.ready_replicas == 1
    assert world.status.condition("Ready").message == "1/4 ready, 3 succeeded"


def test_deadline_is_the_fault_of_no_worker() -> None:
    world = plan_world.World()
    world.do_job("replicas=2", "activeDeadlineSeconds=60")
    world.apply(plan(world.snapshot()))
    world.do_advance("61")
    world.apply(plan(world.snapshot()))
    # Operators before this one read no failure without a cause.
    assert world.status.failure is None
    failed = world.status.condition("Failed")  # type: ignore[arg-type]
    assert failed.status == "True"
    assert failed.message == "DeadlineExceeded: spec.activeDeadlineSeconds (60 s) is over"
