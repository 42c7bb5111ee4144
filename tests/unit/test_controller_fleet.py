"""What all nodes, and the statuses of other jobs, say about where new pods of a job should not go."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everstep_operator.controller import fleet
from everstep_operator.kube.wire import Condition, Node, NodeSpec, NodeStatus, ObjectMeta, Taint, Unstructured
from everstep_operator.plan.snapshot import Fleet
from everstep_operator.plan.state.suspects import HALF_LIFE

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GPU = "nvidia.com/gpu"


def node(
    name: str = "n1",
    *conditions: tuple[str, str],
    ready: str = "True",
    labels: dict[str, str] | None = None,
    taints: tuple[Taint, ...] = (),
    cordoned: bool = False,
    capacity: dict[str, Any] | None = None,
    allocatable: dict[str, Any] | None = None,
) -> Node:
    stated = (("Ready", ready), ("MemoryPressure", "False"), *conditions)
    return Node(
        metadata=ObjectMeta(name=name, labels=labels or {}),
        spec=NodeSpec(taints=taints, unschedulable=cordoned),
        status=NodeStatus(
            conditions=tuple(
                Condition(type=t, status=s, reason="Because", message="what\nis wrong") for t, s in stated
            ),
            capacity=capacity or {},
            allocatable=capacity or {} if allocatable is None else allocatable,
        ),
    )


def template(resources: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "worker", "resources": {"limits": resources or {}}}], **spec}}


def seen(nodes: list[Node], job: dict[str, Any] | None = None) -> Fleet:
    able = fleet.AbleNodes().of(NOW, job or template(), lambda: nodes)
    return fleet.of(job or template(), able, [n for n in nodes if fleet.is_suspect(n)], {})


@pytest.mark.parametrize(
    "condition",
    [
        *(("KernelDeadlock", "True"), ("ReadonlyFilesystem", "True"), ("FrequentKubeletRestart", "True")),
        *(("FrequentUnregisterNetDevice", "True"), ("CorruptDockerOverlay2", "True"), ("KubeletUnhealthy", "True")),
        *(("XfsShutdown", "True"), ("CperHardwareErrorFatal", "True"), ("GPUMissing", "True"), ("NTPProblem", "True")),
        *(("example.com/gpu-failed", "True"), ("DiskFailure", "True")),
        *(("IBLinkFlapping", "True"), ("NVLinkStatusInactive", "True"), ("UnhealthyNvidiaDevicePlugin", "True")),
        *(("AcceleratedHardwareReady", "False"), ("KernelReady", "False"), ("StorageReady", "False")),
    ],
)
def test_condition_that_says_what_is_wrong_speaks_against_a_node(condition: tuple[str, str]) -> None:
    name, status = condition
    assert fleet.conditions(node("n1", condition)) == (f"{name} (what is wrong)",)
    other = "False" if status == "True" else "True"
    assert fleet.conditions(node("n1", (name, other))) == fleet.conditions(node("n1", (name, "Unknown"))) == ()


@pytest.mark.parametrize(
    "condition",
    [
        *(("EtcdIsVoter", "True"), ("VMEventScheduled", "True"), ("NetworkUnavailable", "True")),
        *(("MemoryPressure", "True"), ("DiskPressure", "True"), ("PIDPressure", "True"), ("OutOfDisk", "True")),
        *(("CloudProviderInitialized", "True"), ("GpuReadyForUse", "True"), ("FirmwareUpToDate", "False")),
        *(("DefaultRouteReady", "True"), ("FailoverActive", "True"), ("ErrorFree", "True"), ("NoProblems", "True")),
        *(("FaultToleranceEnabled", "True"), ("example.com/default-route", "True")),
    ],
)
def test_condition_that_may_be_of_a_node_that_is_well_says_nothing(condition: tuple[str, str]) -> None:
    assert fleet.conditions(node("n1", condition)) == ()
    assert fleet.conditions(node(ready="False")) == ()


def test_devices_that_are_not_healthy_speak_against_a_node_only_for_jobs_that_ask_for_them() -> None:
    bad = node("n1", capacity={GPU: "8", "cpu": "64"}, allocatable={GPU: "7", "cpu": "60"})
    good = node("n2", capacity={GPU: "8"})
    assert fleet.devices(bad) == {GPU: (7, 8)}
    assert not fleet.is_suspect(good)
    assert seen([bad, good], template({GPU: "4"})).faults == {"n1": (f"7 of 8 {GPU} are healthy",)}
    assert seen([bad, good]).faults == {}


@pytest.mark.parametrize(
    ("capacity", "allocatable"),
    [
        (
            {"cpu": "64", "memory": "256Gi", "hugepages-1Gi": "8"},
            {"cpu": "60", "memory": "250Gi", "hugepages-1Gi": "0"},
        ),
        ({"attachable-volumes.kubernetes.io/aws": "25"}, {"attachable-volumes.kubernetes.io/aws": "24"}),
        ({GPU: "8"}, {}),  # the kubelet has not stated it yet
        ({GPU: "8"}, {GPU: "odd"}),
        ({GPU: "-"}, {GPU: "1"}),
    ],
)
def test_what_the_kubelet_keeps_back_and_what_is_odd_is_no_fault(
    capacity: dict[str, str], allocatable: dict[str, str]
) -> None:
    assert fleet.devices(node(capacity=capacity, allocatable=allocatable)) == {}


def test_only_nodes_on_which_the_pod_could_run_count() -> None:
    keep = (Taint(key="pool", value="spot", effect="NoSchedule"),)
    passing = (Taint(key="node.kubernetes.io/unreachable", effect="NoExecute"),)
    gpu: dict[str, Any] = {"labels": {"pool": "gpu"}, "capacity": {GPU: "8"}}
    nodes = [
        node("well", **gpu),
        node("out", ready="Unknown", taints=passing, **gpu),
        node("cordoned", cordoned=True, **gpu),
        node("kept", taints=keep, **gpu),
        node("other-pool", labels={"pool": "cpu"}, capacity={GPU: "8"}),
        node("without", labels={"pool": "gpu"}),
    ]
    job = template({GPU: "1"}, nodeSelector={"pool": "gpu"})
    assert seen(nodes, job).able == {"well": True, "out": False}
    for toleration in (
        {"key": "pool", "operator": "Exists"},
        {"key": "pool", "value": "spot", "effect": "NoSchedule"},
        {"operator": "Exists"},
    ):
        tolerant = template({GPU: "1"}, nodeSelector={"pool": "gpu"}, tolerations=[toleration])
        assert seen(nodes, tolerant).able == {"well": True, "out": False, "kept": True}
    strict = template({GPU: "1"}, nodeSelector={"pool": "gpu"}, tolerations=[{"key": "pool", "value": "other"}])
    assert "kept" not in seen(nodes, strict).able
    assert seen([node("kept", ("KernelDeadlock", "True"), taints=keep)]).faults == {}


def job(
    uid: str,
    *names: str,
    points: int = 200,
    at: datetime = NOW,
    excluded: bool = True,
    namespace: str = "default",
) -> Unstructured:
    suspects = [
        {"name": name, "points": points, "at": at.isoformat(), "excluded": excluded, "reasons": ["NodeLost"]}
        for name in names
    ]
    metadata = ObjectMeta(uid=uid, namespace=namespace)
    return Unstructured(metadata=metadata, status={"restarts": {"suspectNodes": suspects}})


def test_node_is_avoided_by_all_jobs_when_two_others_avoid_it() -> None:
    accusers = fleet.Accusers()
    accusers.read(NOW, [job("a", "n1", "n2"), job("b", "n1", points=100), job("c", "n2", excluded=False)])
    end = NOW + HALF_LIFE  # when the second of them forgets it
    assert accusers.against("z", "default") == {"n1": end}
    assert accusers.against("a", "default") == accusers.against("b", "default") == {}, "a job is no witness for itself"


def test_one_namespace_is_one_accuser_for_others_however_many_jobs_it_has() -> None:
    accusers = fleet.Accusers()
    jobs = [job("a", "n1", namespace="theirs"), job("b", "n1", namespace="theirs"), job("c", "n2", "n2")]
    accusers.read(NOW, [*jobs, job("d", "n2", namespace="theirs")])
    assert accusers.against("z", "ours") == {"n2": NOW + 2 * HALF_LIFE}, "default and theirs"
    assert list(accusers.against("z", "theirs")) == ["n1", "n2"], "to a neighbour they are two jobs"
    assert accusers.against("z", "default") == {"n2": NOW + 2 * HALF_LIFE}
    assert accusers.against("d", "theirs").keys() == {"n1"}, "one job that lists a node twice is one"


def test_required_affinity_and_a_node_name_say_where_a_pod_could_run() -> None:
    nodes = [node("g1", labels={"pool": "gpu", "gen": "9"}), node("g2", labels={"pool": "gpu"}), node("c1")]

    def able(*terms: dict[str, Any], **spec: Any) -> list[str]:
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
        affinity = {"nodeAffinity": required} if terms else None
        return list(fleet.AbleNodes().of(NOW, template(affinity=affinity, **spec), lambda: nodes))

    def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
        return {"key": key, "operator": operator, "values": list(values)}

    assert able() == ["g1", "g2", "c1"]
    assert able(nodeName="c1") == ["c1"]
    assert able({"matchExpressions": [expression("pool", "In", "gpu")]}) == ["g1", "g2"]
    assert able({"matchExpressions": [expression("pool", "In", "gpu"), expression("gen", "Gt", "8")]}) == ["g1"]
    assert able({"matchExpressions": [expression("gen", "Lt", "9")]}) == []
    assert able({"matchExpressions": [expression("pool", "NotIn", "gpu")]}) == ["c1"]
    assert able({"matchExpressions": [expression("gen", "DoesNotExist")]}) == ["g2", "c1"]
    by_name = {"matchFields": [expression("metadata.name", "In", "g2")]}
    assert able({"matchExpressions": [expression("gen", "Exists")]}, by_name) == ["g1", "g2"], "one term is enough"
    assert able({}) == [], "as for the scheduler, an empty term selects nothing"


def test_what_another_version_or_a_person_has_written_accuses_nobody_and_breaks_nothing() -> None:
    ahead = job("a", "n1", at=NOW + timedelta(days=400))
    forgotten = job("b", "n1", at=NOW - timedelta(days=1))
    odd: list[Any] = [{"restarts": {"suspectNodes": value}} for value in ("n1", [{"name": 3}], [None], {"n1": 1})]
    jobs = [ahead, forgotten, *(Unstructured(metadata=ObjectMeta(uid=str(s)), status=s) for s in odd)]
    accusers = fleet.Accusers()
    accusers.read(NOW, jobs)
    assert accusers.against("z", "default") == {}
    assert not any(fleet.accuses(Unstructured(status=s)) for s in ({}, {"restarts": None}, {"restarts": {}}))


def test_job_of_a_newer_operator_accuses_a_node_also_for_a_reason_that_this_one_does_not_know() -> None:
    jobs = [job("a", "n1"), job("b", "n1")]
    for one in jobs:
        one.status["restarts"]["suspectNodes"][0]["reasons"] = ["CosmicRay"]
    accusers = fleet.Accusers()
    accusers.read(NOW, jobs)
    assert list(accusers.against("z", "default")) == ["n1"]


def test_statuses_of_all_jobs_are_read_again_after_some_seconds() -> None:
    accusers = fleet.Accusers()
    accusers.read(NOW, [])
    accusers.read(NOW + timedelta(seconds=9), [job("a", "n1"), job("b", "n1")])
    assert accusers.against("z", "default") == {}
    accusers.read(NOW + timedelta(seconds=10), [job("a", "n1"), job("b", "n1")])
    assert list(accusers.against("z", "default")) == ["n1"]


def test_nodes_are_read_once_in_some_seconds_for_all_jobs_that_ask_for_the_same() -> None:
    able, readings = fleet.AbleNodes(), list[str]()

    def nodes() -> list[Node]:
        readings.append("")
        return [node("n1")]

    for seconds in range(20):
        for spec in (template(), template(priority=3), template(nodeSelector={"pool": "gpu"})):
            names = able.of(NOW + timedelta(seconds=seconds), spec, nodes)
            assert list(names) == ([] if "nodeSelector" in spec["spec"] else ["n1"])
    assert len(readings) == 4
    for number in range(2 * fleet.MAX_REQUESTS):
        able.of(NOW, template(nodeSelector={"pool": str(number)}), nodes)
    assert len(able._by_request) == fleet.MAX_REQUESTS


def test_fault_on_one_of_5000_nodes_costs_a_pass_little_time() -> None:
    nodes = [node(f"n{number}", capacity={GPU: "8"}) for number in range(5000)]
    able, job = fleet.AbleNodes(), template({GPU: "1"})
    took = []
    for _ in range(50):
        began = time.process_time()
        fleet.of(job, able.of(NOW, job, lambda: nodes), nodes[:3], {})
        took.append(time.process_time() - began)
    assert min(took) < 0.002
