"""Times that other clocks wrote: a wait never gets longer by them, and no sum overflows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everstep_operator.api.parse import parse_status
from everstep_operator.plan import times
from everstep_operator.plan.planner import plan
from everstep_operator.plan.snapshot import NodeHealth, NodeView
from support.operator.kubelet_pods import BACKENDS, a_world, act, ended, running, tell

ENDS = ["9999-12-31T23:59:59Z", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00"]
FINISHED = [{"type": "Complete", "status": "True", "reason": "Complete", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
STORED: dict[str, Any] = {
    "start": lambda at: {"startTime": at},
    "end": lambda at: {"completionTime": at, "conditions": FINISHED},
    "restart": lambda at: {"restarts": {"lastAt": at, "inWindow": 9, "windowStartedAt": at, "incidentAt": at}},
    "rejection": lambda at: {"restarts": {"rejectedAt": at, "rejections": 9, "rejectedBy": ["n1"]}},
    "lost node": lambda at: {"restarts": {"lostNodes": [{"name": "n1", "times": 99, "at": at}]}},
    "world": lambda at: {"world": {"round": 1, "size": 2, "since": at, "formedAt": at, "formedRound": 1}},
    "condition": lambda at: {"conditions": [{**FINISHED[0], "type": "Resizing", "lastTransitionTime": at}]},
}


def with_stored(world: Any, field: str, at: str) -> None:
    world.status = parse_status({**world.status.to_wire(), **STORED[field](at)})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("field", STORED)
@pytest.mark.parametrize("at", ENDS)
def test_status_with_times_at_the_ends_of_the_calendar_has_a_plan(backend: str, field: str, at: str) -> None:
    world = a_world(backend)
    world.do_job("activeDeadlineSeconds=100000", "ttlSecondsAfterFinished=100", "recovery.startTimeoutSeconds=60")
    with_stored(world, field, at)
    act(world)
    if world.current(1) in world.pods:
        world.do_fail("1")
    world.do_advance("3")
    act(world)


@pytest.mark.parametrize("field", STORED)
def test_stored_time_in_the_future_is_written_as_now(field: str) -> None:
    world = a_world("everstep")
    with_stored(world, field, "2026-01-01T07:00:00Z")
    written = plan(world.snapshot()).status.to_wire()
    assert "2026-01-01T07" not in str(written)
    assert "2026-01-01T07" in str(world.status.to_wire())


def test_loss_after_an_incident_in_the_future_is_charged() -> None:
    """It would be a part of that incident for as long as the clock of the last leader was ahead."""
    world = a_world("everstep")
    status = world.status.to_wire()
    world.status = parse_status({**status, "restarts": {"lastAt": None, "incidentAt": "2026-01-01T07:00:00Z"}})
    act(world)
    world.do_advance("11")
    world.do_fail("1")
    act(world)
    assert world.status.restarts.user_code == 1


@pytest.mark.parametrize("ahead", [timedelta(0), timedelta(hours=7), timedelta(days=365 * 7000)])
def test_side_cars_of_a_finished_job_end_whatever_the_clock_of_their_node_is(ahead: timedelta) -> None:
    world = a_world("everstep")
    for index in (0, 1):
        tell(world, index, ended(0, world.now + ahead), {"mesh": running()})
    world.do_close()
    act(world)
    assert len(world.pods) == 2
    world.do_advance("31")
    act(world)
    assert not world.pods


@pytest.mark.parametrize("backend", BACKENDS)
def test_node_whose_clock_is_ahead_gets_no_longer_grace(backend: str) -> None:
    world = a_world(backend)
    world.do_advance("60")
    world.nodes["n2"] = NodeView("n2", NodeHealth.NOT_READY, world.now + timedelta(hours=7), "KubeletNotReady")
    act(world)
    world.do_advance("121")
    told = act(world)
    assert "NodeLost" in told or world.status.restarts.infrastructure == 1


@pytest.mark.parametrize("seconds", [10**9, 10**12, 10**30, 1e300, float("inf")])
def test_sum_of_times_stays_in_the_calendar(seconds: float) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert now < times.after(now, seconds) <= times.LAST
    assert times.FIRST <= times.after(now, -seconds) < now
    assert times.after(datetime.max.replace(tzinfo=UTC), seconds) == times.LAST
    assert times.after(datetime.min.replace(tzinfo=UTC), -seconds) == times.FIRST
