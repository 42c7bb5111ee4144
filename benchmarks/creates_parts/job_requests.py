"""What the operator wrote for one job, as requests that a client without its logic sends for any other job.

The objects are read from the API server after the operator has made them, so their bodies contain its defaults and are
a little larger than what the operator sent. The statuses are those that a watch has seen, each as the patch that leads
to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from everstep.contract import labels
from everstep_operator.controller.record import merge_patch
from everstep_operator.kube.resources import CONFIGMAPS, EVENTS, NETWORK_POLICIES, PDBS, PODS, SERVICES, Resource
from everstep_operator.main import JOBS
from testcluster.controlplane import ControlPlane

Request: TypeAlias = tuple[str, dict[str, Any]]  # path and body; see `bare.py`

BEFORE_PODS: tuple[Resource[Any], ...] = (SERVICES, NETWORK_POLICIES, PDBS, CONFIGMAPS)
ADDED = "kube-api-access"  # how the names of the volumes begin that admission adds to a pod


@dataclass(frozen=True, slots=True)
class JobRequests:
    """The requests for the job `name` with `uid`, in the order of a pass."""

    name: str
    uid: str
    requests: tuple[Request, ...]

    @classmethod
    def seen(
        cls, plane: ControlPlane, namespace: str, name: str, uid: str, statuses: Sequence[Mapping[str, Any]]
    ) -> JobRequests:
        path = JOBS.path(namespace, name, "status")
        before: Sequence[Mapping[str, Any]] = [{}, *statuses]
        patches = [(path, {"status": merge_patch(old, new)}) for old, new in zip(before, statuses, strict=False)]

        def objects(*resources: Resource[Any]) -> list[Request]:
            found = ((one, _objects(plane, namespace, name, one)) for one in resources)
            return [(one.path(namespace), _as_sent(one, body)) for one, bodies in found for body in bodies]

        first, later = patches[:1], patches[1:]
        return cls(name, uid, (*first, *objects(*BEFORE_PODS), *objects(PODS), *later, *objects(EVENTS)))

    def of(self, name: str, uid: str) -> list[Request]:
        """The same for another job, whose name must be as long."""
        text = json.dumps(self.requests).replace(self.name, name).replace(self.uid, uid)
        return [(path, body) for path, body in json.loads(text)]


def pods_alone(requests: Iterable[Request]) -> list[Request]:
    """The pods of these, without an owner."""
    pods = [(path, body) for path, body in requests if body.get("kind") == PODS.kind]
    return [(p, {**b, "metadata": {k: v for k, v in b["metadata"].items() if k != "ownerReferences"}}) for p, b in pods]


def kubectl_name(resource: Resource[Any]) -> str:
    """The name that means this resource and no other."""
    return f"{resource.plural}.{resource.group}" if resource.group else resource.plural


def _objects(plane: ControlPlane, namespace: str, job: str, resource: Resource[Any]) -> list[dict[str, Any]]:
    done = plane.kubectl("get", kubectl_name(resource), "-n", namespace, "-l", f"{labels.JOB}={job}", "-o", "json")
    assert done.returncode == 0, done.stderr
    items: list[dict[str, Any]] = json.loads(done.stdout)["items"]
    return items


def _as_sent(resource: Resource[Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Without what the API server and its admission have added."""
    kept = ("name", "namespace", "labels", "annotations", "ownerReferences")
    meta = {key: found["metadata"][key] for key in kept if key in found["metadata"]}
    body = {key: value for key, value in found.items() if key not in ("metadata", "status")}
    body |= {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta}
    if resource is PODS:
        spec = {key: value for key, value in body["spec"].items() if key not in ("nodeName", "tolerations")}
        spec["volumes"] = _without_added(spec.get("volumes", []))
        spec["containers"] = [
            {**one, "volumeMounts": _without_added(one.get("volumeMounts", []))} for one in spec["containers"]
        ]
        body["spec"] = spec
    return body


def _without_added(named: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in named if not one["name"].startswith(ADDED)]
