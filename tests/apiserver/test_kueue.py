"""Kueue's controller answers a Workload that another controller made in the ways that docs/adr/0068 builds on.

Kueue's controller runs as it ships. The test plays the part of the operator.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest

from support.apiserver.queues import Queue, make_queue
from testcluster.kueue import Kueue

pytestmark = [pytest.mark.apiserver, pytest.mark.long, pytest.mark.usefixtures("kueue_programs")]

ELASTIC = {"kueue.x-k8s.io/elastic-job": "true"}
REPLACES = "kueue.x-k8s.io/workload-slice-replacement-for"


@pytest.fixture
def queue_of(crd: Any, kueue: Kueue) -> Callable[[int], Queue]:
    def make(cpus: int) -> Queue:
        name = f"kueue-{secrets.token_hex(3)}"
        assert crd.kubectl("create", "namespace", name).returncode == 0
        return make_queue(crd, kueue, name, cpus)

    return make


def test_workload_is_admitted_with_its_flavor_and_waits_where_there_is_no_quota(
    queue_of: Callable[[int], Queue],
) -> None:
    queue = queue_of(4)
    queue.apply(queue.workload("first", 4))
    queue.until("the first is admitted", lambda: queue.holds("first", "Admitted"))
    assert (queue.assigned("first")["count"], queue.assigned("first")["flavors"]) == (4, {"cpu": queue.namespace})
    queue.apply(queue.workload("second", 1))
    queue.until("Kueue says why", lambda: queue.condition("second", "QuotaReserved")["status"] == "False")
    assert "insufficient unused quota for cpu" in queue.condition("second", "QuotaReserved")["message"]

    queue.set_conditions("first", ("Finished", "True", "Succeeded"))
    queue.until("what has finished gives its quota back", lambda: queue.holds("second", "Admitted"))


def test_workload_with_a_least_count_is_admitted_with_what_there_is(queue_of: Callable[[int], Queue]) -> None:
    queue = queue_of(3)
    queue.apply(queue.workload("elastic", 4, least=2))
    queue.until("it is admitted", lambda: queue.holds("elastic", "Admitted"))
    assert queue.assigned("elastic")["count"] == 3
    assert queue.read("elastic")["spec"]["podSets"][0]["count"] == 4


def test_evicted_workload_keeps_its_quota_until_its_controller_gives_it_back(queue_of: Callable[[int], Queue]) -> None:
    queue = queue_of(4)
    queue.apply(queue.workload("low", 3))
    queue.until("it is admitted", lambda: queue.holds("low", "Admitted"))
    queue.apply(queue.workload("high", 3, priority=100))
    queue.until("it is asked to go", lambda: queue.holds("low", "Evicted"))
    assert queue.condition("low", "Evicted")["reason"] == "Preempted"
    assert queue.holds("low", "QuotaReserved"), "its pods may still run: they save first"
    assert not queue.holds("high", "Admitted")

    queue.set_conditions(
        "low", ("QuotaReserved", "False", "Pending"), ("Admitted", "False", "NoReservation"), admission=None
    )
    queue.until("the other is admitted", lambda: queue.holds("high", "Admitted"))
    queue.set_conditions("high", ("Finished", "True", "Succeeded"))
    queue.set_conditions("low", ("Evicted", "False", "QuotaReserved"), ("Requeued", "True", "Preempted"))
    queue.until("it is admitted again", lambda: queue.holds("low", "Admitted"))


def test_larger_slice_replaces_the_one_that_trains_when_there_is_quota(queue_of: Callable[[int], Queue]) -> None:
    queue = queue_of(4)
    queue.apply(queue.workload("two", 2, annotations=ELASTIC), queue.workload("other", 1))
    queue.until("both are admitted", lambda: queue.holds("two", "Admitted") and queue.holds("other", "Admitted"))
    queue.apply(queue.workload("four", 4, annotations={**ELASTIC, REPLACES: f"{queue.namespace}/two"}))
    queue.until("Kueue says why", lambda: queue.condition("four", "QuotaReserved")["status"] == "False")
    assert queue.holds("two", "Admitted"), "the job trains on with what it has"
    assert not queue.holds("two", "Evicted")
    queue.set_conditions("other", ("Finished", "True", "Succeeded"))
    queue.until("the larger one is admitted", lambda: queue.holds("four", "Admitted"))
    queue.until("the smaller one is over", lambda: queue.holds("two", "Finished"))
    assert queue.condition("two", "Finished")["reason"] == "WorkloadSliceReplaced"


def test_slice_that_is_made_smaller_gives_quota_back_at_once(queue_of: Callable[[int], Queue]) -> None:
    queue = queue_of(4)
    queue.apply(queue.workload("job", 4, annotations=ELASTIC))
    queue.until("it is admitted", lambda: queue.holds("job", "Admitted"))
    queue.apply(queue.workload("other", 2))
    queue.until("the other waits", lambda: queue.condition("other", "QuotaReserved")["status"] == "False")
    queue.apply(queue.workload("job", 2, annotations=ELASTIC))
    queue.until("the other is admitted", lambda: queue.holds("other", "Admitted"))
    assert not queue.holds("job", "Evicted")
