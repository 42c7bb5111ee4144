"""Kueue's controller answers a Workload that another controller made in the ways that docs/adr/0068 builds on.

Kueue's controller runs as it ships. The part of the operator, which has no integration yet, is played by the test.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from testcluster.kueue import Kueue

pytestmark = [pytest.mark.apiserver, pytest.mark.long, pytest.mark.usefixtures("kueue_programs")]

GROUP = "kueue.x-k8s.io/v1beta2"
ELASTIC = {"kueue.x-k8s.io/elastic-job": "true"}
REPLACES = "kueue.x-k8s.io/workload-slice-replacement-for"
SECONDS = 60.0


@pytest.fixture(scope="module")
def kueue(crd: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kueue]:
    server = Kueue(crd, tmp_path_factory.mktemp("kueue"), ("TrainingJob.v1alpha1.everstep.dev",))
    server.start()
    yield server
    server.stop()


@dataclass
class Queue:
    """A queue of a namespace of its own, with so many CPUs on nodes of one flavor."""

    plane: Any
    server: Kueue
    namespace: str

    def apply(self, *bodies: dict[str, Any]) -> None:
        for body in bodies:
            done = self.plane.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(body))
            assert done.returncode == 0, done.stderr

    def workload(
        self, name: str, count: int, least: int | None = None, priority: int = 0, annotations: Mapping[str, str] = {}
    ) -> dict[str, Any]:
        """Of workers that ask for one CPU each."""
        container = {"name": "worker", "image": "train:1", "resources": {"requests": {"cpu": "1"}}}
        pod_set = {
            "name": "main", "count": count, **({"minCount": least} if least else {}),
            "template": {"spec": {"containers": [container], "restartPolicy": "Never"}},
        }  # fmt: skip
        return {
            "apiVersion": GROUP, "kind": "Workload",
            "metadata": {"name": name, "namespace": self.namespace, "annotations": dict(annotations)},
            "spec": {"queueName": "queue", "podSets": [pod_set], "priority": priority, "active": True},
        }  # fmt: skip

    def read(self, name: str) -> dict[str, Any]:
        done = self.plane.kubectl("get", "workload", name, "-n", self.namespace, "-o", "json")
        assert done.returncode == 0, done.stderr
        body: dict[str, Any] = json.loads(done.stdout)
        return body

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        found = self.read(name).get("status", {}).get("conditions", [])
        return next((each for each in found if each["type"] == kind), {"status": "absent"})

    def holds(self, name: str, kind: str) -> bool:
        return bool(self.condition(name, kind)["status"] == "True")

    def assigned(self, name: str) -> dict[str, Any]:
        (one,) = self.read(name)["status"]["admission"]["podSetAssignments"]
        assert isinstance(one, dict)
        return one

    def set_conditions(self, name: str, *changed: tuple[str, str, str], **status: Any) -> None:
        """Each with its status and reason; as the controller of a job does."""
        body = self.read(name)
        conditions = {each["type"]: each for each in body["status"].get("conditions", [])}
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for kind, value, reason in changed:
            conditions[kind] = {
                "type": kind, "status": value, "reason": reason, "message": "by the test", "lastTransitionTime": now,
            }  # fmt: skip
        patch = {"status": {"conditions": list(conditions.values()), **status}}
        done = self.plane.kubectl(
            "patch", "workload", name, "-n", self.namespace, "--subresource=status", "--type=merge",
            "-p", json.dumps(patch),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < deadline, f"{what}\n{self.server.log()[-3000:]}"
            time.sleep(0.1)


@pytest.fixture
def queue_of(crd: Any, kueue: Kueue) -> Callable[[int], Queue]:
    def make(cpus: int) -> Queue:
        name = f"kueue-{secrets.token_hex(3)}"
        assert crd.kubectl("create", "namespace", name).returncode == 0
        queue = Queue(crd, kueue, name)
        selector = {"matchLabels": {"kubernetes.io/metadata.name": name}}
        quota = {"name": name, "resources": [{"name": "cpu", "nominalQuota": cpus}]}
        queue.apply(
            {
                "apiVersion": GROUP, "kind": "ResourceFlavor", "metadata": {"name": name},
                "spec": {"nodeLabels": {"pool": name}},
            },
            {
                "apiVersion": GROUP, "kind": "ClusterQueue", "metadata": {"name": name},
                "spec": {
                    "namespaceSelector": selector, "preemption": {"withinClusterQueue": "LowerPriority"},
                    "resourceGroups": [{"coveredResources": ["cpu"], "flavors": [quota]}],
                },
            },
            {
                "apiVersion": GROUP, "kind": "LocalQueue", "metadata": {"name": "queue", "namespace": name},
                "spec": {"clusterQueue": name},
            },
        )  # fmt: skip
        return queue

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
