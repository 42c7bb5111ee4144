"""Queues of Kueue on the loopback, each with the quota of one flavor of nodes, and Workloads of others in them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from testcluster.kueue import Kueue

GROUP = "kueue.x-k8s.io/v1beta2"
SECONDS = 60.0


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

    def delete(self, name: str) -> None:
        """A Workload."""
        done = self.plane.kubectl("delete", "workload", name, "-n", self.namespace)
        assert done.returncode == 0, done.stderr

    def workload(
        self,
        name: str,
        count: int,
        least: int | None = None,
        priority: int = 0,
        annotations: Mapping[str, str] = {},
        cpu: str = "1",
    ) -> dict[str, Any]:
        """Of workers that ask for so many CPUs each."""
        container = {"name": "worker", "image": "train:1", "resources": {"requests": {"cpu": cpu}}}
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
        return self.get("workload.kueue.x-k8s.io", name)

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

    def change(self, kind: str, name: str, patch: dict[str, Any]) -> None:
        done = self.plane.kubectl(
            "patch", f"{kind}.kueue.x-k8s.io", name, "-n", self.namespace, "--type=merge", "-p", json.dumps(patch)
        )
        assert done.returncode == 0, done.stderr

    def get(self, kind: str, name: str) -> dict[str, Any]:
        done = self.plane.kubectl("get", kind, name, "-n", self.namespace, "-o", "json")
        assert done.returncode == 0, done.stderr
        body: dict[str, Any] = json.loads(done.stdout)
        return body

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < deadline, f"{what}\n{self.server.log()[-3000:]}"
            time.sleep(0.1)


def make_queue(
    plane: Any, server: Kueue, namespace: str, cpus: int | str, strategy: str = "BestEffortFIFO", memory: str = ""
) -> Queue:
    """A queue named `queue` in a namespace that exists, with so many CPUs on nodes with the label `pool`, and so much
    memory, where pods ask for it."""
    queue = Queue(plane, server, namespace)
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    resources = [{"name": "cpu", "nominalQuota": cpus}]
    resources += [{"name": "memory", "nominalQuota": memory}] if memory else []
    quota = {"name": namespace, "resources": resources}
    queue.apply(
        {
            "apiVersion": GROUP, "kind": "ResourceFlavor", "metadata": {"name": namespace},
            "spec": {"nodeLabels": {"pool": namespace}},
        },
        {
            "apiVersion": GROUP, "kind": "ClusterQueue", "metadata": {"name": namespace},
            "spec": {
                "queueingStrategy": strategy, "namespaceSelector": selector,
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [{"coveredResources": [r["name"] for r in resources], "flavors": [quota]}],
            },
        },
        {
            "apiVersion": GROUP, "kind": "LocalQueue", "metadata": {"name": "queue", "namespace": namespace},
            "spec": {"clusterQueue": namespace},
        },
    )  # fmt: skip
    return queue
