"""Waiting for capacity is no failed attempt: however long workers wait for one that cannot run, their job goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep_local.plan.simulation import agents as elastic_world
from everstep_local.plan.simulation import cluster as plan_world
from everstep_operator.api.conditions import Cause
from everstep_operator.plan.snapshot import PodPhase
from everstep_operator.plan.state.facts import derive

TIMEOUT = 600  # spec.rendezvous.joinTimeoutSeconds
GAVE_UP = "digits-w0 was not taken into a round newer than 1 in time: 1 of at least 2 agents wait"
# What torchrun says under c10d: worker 0 waits for the others; the others do not reach the store of worker 0.
TIMED_OUT = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"
NO_STORE = "RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details."
BACKENDS = ("everstep", "etcd", "c10d")


def cannot_be_scheduled(world: Any, index: int) -> None:
    world.do_unschedulable(str(index))


def is_refused(world: Any, index: int) -> None:
    world.pods.pop(world.current(index), None)
    world.do_refuse("pods are forbidden: exceeded quota")


def pulls_its_image(world: Any, index: int) -> None:
    world.change(world.current(index), waiting="ImagePullBackOff: back-off pulling image")


def has_no_words(world: Any, index: int) -> None:
    """Its volume does not mount: it is ContainerCreating."""


WAITS = (cannot_be_scheduled, is_refused, pulls_its_image, has_no_words)


def trained(backend: str, workers: int = 2, minimum: int | None = None) -> Any:
    """A job that has trained for 60 s."""
    world: Any = plan_world.World() if backend == "c10d" else elastic_world.ElasticWorld()
    if backend == "etcd":
        world.do_etcd()
    if backend != "c10d" and minimum is None:
        world.do_fixed()
    world.do_job(f"replicas={workers}", f"recovery.maxRestarts={1}")
    world.do_settle()
    together(world, 5)
    world.do_advance("60")
    return world


def together(world: Any, step: int) -> None:
    """All workers run, meet and take a step."""
    for name in [n for n, p in world.pods.items() if p.started_at is None and not p.finished]:
        world.pods[name] = replace(
            world.pods[name], unschedulable=None, waiting=None, node=world.pods[name].node or "n1"
        )
    world.do_ready(*(str(p.index) for p in world.pods.values() if p.name == world.current(p.index) and not p.finished))
    if world.view is not None:
        world.do_form()
    world.do_advance("1")
    world.do_step(str(step))
    world.do_reconcile()


def time_out(world: Any, missing: set[int]) -> None:
    """A join time-out passes; then all that wait give up."""
    world.do_reconcile()
    world.do_advance("5")
    waiting = [p.index for p in world.pods.values() if p.name == world.current(p.index) and p.index not in missing]
    world.do_ready(*map(str, waiting))
    world.do_reconcile()
    world.do_advance(str(TIMEOUT))
    backend = world.spec["rendezvous"]["backend"]
    for index in waiting:
        text = GAVE_UP if backend != "c10d" else TIMED_OUT if index == 0 else NO_STORE
        world.do_fail(str(index), "1", text)
    world.do_reconcile()


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("waits", WAITS)
def test_job_that_waits_for_capacity_for_hours_goes_on(
    backend: str, waits: Callable[[Any, int], None], missing: int
) -> None:
    world = trained(backend)
    world.do_fail(str(missing), "137")
    world.do_reconcile()
    before = world.status.restarts
    for _ in range(8):
        if world.current(missing) in world.pods:
            waits(world, missing)
        time_out(world, {missing})
        assert world.status.failure is None, world.status.failure
    assert world.status.condition("Failed").status == "False"
    assert world.status.restarts.user_code == 0
    assert world.status.restarts.without_progress == before.without_progress
    assert world.status.restarts.in_window == 0  # no back-off grows
    assert world.status.recoveries[0].cause is Cause.PEER_MISSING
    world.do_refuse()
    world.do_reconcile()
    together(world, 9)
    world.do_reconcile()
    assert world.status.condition("Ready").reason == "Running"


@pytest.mark.parametrize("backend", BACKENDS)
def test_workers_that_all_run_and_never_meet_end_their_job(backend: str) -> None:
    """The counterpart: nobody lacks capacity, and something else keeps them apart."""
    world = trained(backend)
    world.do_fail("1", "137")
    for _ in range(4):
        time_out(world, set())
        if world.status.failure is not None:
            break
    assert world.status.failure is not None
    assert world.status.failure.message.startswith("NoProgress: ")


@pytest.mark.parametrize("backend", ["everstep", "etcd"])
def test_workers_that_are_enough_without_the_missing_one_do_not_wait_for_it(backend: str) -> None:
    world = trained(backend, workers=4, minimum=2)
    world.do_fail("3", "137")
    world.do_reconcile()
    for _ in range(4):
        cannot_be_scheduled(world, 3)
        time_out(world, {3})
        if world.status.failure is not None:
            break
    assert world.status.failure is not None
    assert "RendezvousTimeout" in str(world.status.recoveries[0].cause)


def test_worker_that_came_a_moment_before_the_others_gave_up_was_missing() -> None:
    world = trained("everstep")
    world.do_fail("1", "137")
    world.do_reconcile()
    cannot_be_scheduled(world, 1)
    world.do_advance(str(TIMEOUT - 2))
    world.do_ready("1")
    world.do_advance("2")
    world.do_fail("0", "1", GAVE_UP)
    [loss] = derive(world.snapshot()).lost
    assert loss.cause is Cause.PEER_MISSING
    assert "worker 1" in loss.detail


def test_worker_that_came_at_once_was_not_missing() -> None:
    world = trained("everstep")
    world.do_fail("1", "137")
    world.do_reconcile()
    world.do_advance("20")
    world.do_ready("1")
    world.do_advance(str(TIMEOUT - 15))
    world.do_fail("0", "1", GAVE_UP)
    [loss] = derive(world.snapshot()).lost
    assert loss.cause is Cause.RENDEZVOUS_TIMEOUT


def test_worker_that_its_node_rejects_was_missing_and_is_the_root_cause() -> None:
    world = trained("everstep")
    world.do_fail("1", "137")
    world.do_reconcile()
    world.change(world.current(1), phase=PodPhase.FAILED, reason="OutOfcpu")
    world.do_fail("0", "1", GAVE_UP)
    first, second = derive(world.snapshot()).lost
    assert (first.index, second.index) == (1, 0)
    assert second.cause is Cause.PEER_MISSING


events = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.sampled_from(WAITS)),
        st.tuples(st.just("advance"), st.integers(0, 40_000)),
        st.tuples(st.just("time out"), st.none()),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("act"), st.none()),
        st.tuples(st.just("edit"), st.sampled_from([1, 3])),
    ),
    max_size=25,
)


@pytest.mark.long_but("everstep")
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=events, missing=st.sets(st.integers(0, 2), min_size=1, max_size=3))
def test_no_length_of_a_wait_for_capacity_ends_a_job(
    backend: str, history: list[tuple[str, Any]], missing: set[int]
) -> None:
    world = trained(backend, workers=3)
    for index in missing:
        world.do_fail(str(index), "137")
    world.do_reconcile()
    for name, value in history:
        there = [i for i in sorted(missing) if world.current(i) in world.pods]
        match name:
            case "wait":
                for index in there:
                    value(world, index)
            case "advance":
                world.do_advance(str(value))
            case "time out":
                time_out(world, missing)
            case "restart" if backend != "c10d":
                unread = world.view
                world.do_operator_restart()
                world.do_reconcile()
                world.view = unread
            case "edit":
                world.do_job(f"recovery.noProgressLimit={value}")
            case _:
                world.do_reconcile()
        assert world.status.condition("Failed").status == "False", world.status.condition("Failed").message
    world.do_refuse()
    for _ in range(3):
        world.do_reconcile()
    together(world, 9)
    world.do_reconcile()
    assert world.status.condition("Ready").reason == "Running"
    assert world.status.restarts.user_code == 0
