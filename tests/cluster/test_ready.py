"""A cluster that came back is ready by signs of life, not by what its API server remembers of it."""

from datetime import datetime
from typing import Any

from testcluster.kindcluster import stale

NODES = {"node-a": datetime.fromisoformat("2030-01-01T10:00:00.900000Z")}
SINCE = datetime.fromisoformat("2030-01-01T10:00:20Z")
CONTROLLERS = ("kube-controller-manager", "kube-scheduler")


def leases(renewed: str, *names: str) -> dict[str, Any]:
    return {"items": [{"metadata": {"name": name}, "spec": {"renewTime": renewed}} for name in names]}


def pods(*statuses: dict[str, Any], node: str = "node-a") -> dict[str, Any]:
    pod = {"metadata": {"name": "dns"}, "spec": {"nodeName": node}, "status": {"containerStatuses": list(statuses)}}
    return {"items": [pod]}


def running(since: str) -> dict[str, Any]:
    return {"state": {"running": {"startedAt": since}}}


YOUNG = leases("2030-01-01T10:00:21.000000Z", "node-a", *CONTROLLERS)
ALIVE = pods(running("2030-01-01T10:00:00Z"))  # Kubernetes tells no fractions: the same second counts


def test_renewed_leases_and_young_containers_are_not_stale() -> None:
    assert stale(YOUNG, ALIVE, NODES, SINCE) == []


def test_lease_from_before_is_stale_for_nodes_and_controllers() -> None:
    old = leases("2030-01-01T10:00:19.000000Z", "node-a", *CONTROLLERS)
    assert stale(old, ALIVE, NODES, SINCE) == ["lease node-a", *(f"lease {name}" for name in CONTROLLERS)]


def test_node_without_a_lease_is_stale() -> None:
    assert stale(leases("2030-01-01T10:00:21Z", *CONTROLLERS), ALIVE, NODES, SINCE) == ["lease node-a"]


def test_ready_pod_whose_container_began_before_its_node_is_stale() -> None:
    assert stale(YOUNG, pods(running("2030-01-01T09:59:59Z")), NODES, SINCE) == ["pod dns"]


def test_pod_without_running_containers_or_without_a_node_is_stale() -> None:
    assert stale(YOUNG, pods(), NODES, SINCE) == ["pod dns"]
    assert stale(YOUNG, pods({"state": {"waiting": {}}}), NODES, SINCE) == ["pod dns"]
    assert stale(YOUNG, pods(running("2030-01-01T10:00:01Z"), node="gone"), NODES, SINCE) == ["pod dns"]
