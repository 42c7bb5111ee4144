"""Random scripts: the same requests sent to any world, and what came of each in words that do not depend on the world.

UIDs, versions and times differ between two worlds, so a script names them: "the UID that the object had first", "the
version that it had last but one". What is compared is everything else.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from everstep_operator.kube.client import Changed
from everstep_operator.kube.errors import KubeError
from everstep_operator.kube.resources import LEASES, PODS, Resource
from everstep_operator.kube.wire import KubeObject, Pod
from support.conformity.bodies import BINDINGS, CONFIGMAPS, JOBS, NO_UID, configmap, job, pod
from support.conformity.world import World

NAMES = ("a", "b")
FINALIZER = "everstep.dev/test"
Request = tuple[Any, ...]


def script(seed: int, length: int) -> list[Request]:
    """Requests as plain tuples; the first element is the verb."""
    rng = random.Random(seed)
    return [_request(rng) for _ in range(length)]


def _request(rng: random.Random) -> Request:
    resource = rng.choice((CONFIGMAPS, JOBS, JOBS, PODS, PODS, LEASES))
    name = rng.choice(NAMES)
    verb = rng.choices(
        ("create", "get", "patch", "status", "replace", "delete", "bind", "free"),
        (6, 1, 5, 4, 2, 3, 1, 2),
    )[0]
    version = rng.choice((None, None, None, "newest", "newest", "stale"))
    match verb:
        case "create":
            return verb, resource, name, _body(rng, resource, name)
        case "patch":
            return verb, resource, name, _patch(rng, resource), version
        case "status":
            return verb, resource, name, _status(rng, resource), version
        case "replace":
            return verb, resource, name, _body(rng, resource, name), version
        case "delete":
            uid = rng.choice((None, None, "own", "another"))
            propagation = rng.choice((None, "Background"))
            return verb, resource, name, uid, version, rng.choice((None, 0, 5, 40)), propagation
        case "bind":
            return verb, PODS, name, rng.choice(("n1", "n2"))
        case _:
            return verb, resource, name


def _labels(rng: random.Random) -> dict[str, str]:
    return {key: rng.choice("12") for key in "xy" if rng.random() < 0.5}


def _body(rng: random.Random, resource: Resource[Any], name: str) -> dict[str, Any]:
    labels = _labels(rng)
    if resource is CONFIGMAPS:
        body = configmap(name, _labels(rng), **labels)
    elif resource is JOBS:
        body = job(name, _spec(rng))
        body["metadata"]["labels"] = labels
    elif resource is PODS:
        body = pod(name, **labels)
        body["spec"]["terminationGracePeriodSeconds"] = rng.choice((0, 10, 30))
        body["spec"]["automountServiceAccountToken"] = False
    else:
        body = {"metadata": {"name": name, "labels": labels}, "spec": {"holderIdentity": rng.choice("pq")}}
        if rng.random() < 0.3:
            body["spec"]["leaseDurationSeconds"] = rng.choice((0, 6))
    if rng.random() < 0.25:
        body["metadata"]["finalizers"] = [FINALIZER]
    return body


def _spec(rng: random.Random) -> dict[str, Any]:
    """Changes of a job's spec, some of them wrong."""
    found: dict[str, Any] = {}
    choices: dict[str, tuple[Any, ...]] = {
        "replicas": (1, 2, 5, 0),
        "processesPerReplica": (1, "auto", "many", 65),
        "activeDeadlineSeconds": (None, 60, 0),
        "podCleanup": ("All", "Some", None),
        "managedBy": ("example.com/x", "nothing"),
        "recovery.maxRestarts": (1, -1, None),
        "recovery.backoffSeconds": ({"initial": 5}, {"initial": 500}, {"initial": 5, "max": 1}),
        "checkpoint": ({"url": "s3://b/a"}, {"url": "s3://b/../a"}, {"everySteps": 5}),
        "unknown": (1,),
    }
    for path, values in choices.items():
        if rng.random() < 0.15:
            found[path] = rng.choice(values)
    return found


def _patch(rng: random.Random, resource: Resource[Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if rng.random() < 0.4:
        metadata["labels"] = {rng.choice("xy"): rng.choice(("1", "2", None))}
    if rng.random() < 0.2:
        metadata["annotations"] = {"note": rng.choice(("1", None))}
    if rng.random() < 0.15:
        metadata["finalizers"] = rng.choice((None, [FINALIZER], [FINALIZER, "everstep.dev/more"]))
    patch: dict[str, Any] = {"metadata": metadata} if metadata else {}
    if resource is CONFIGMAPS:
        patch["data"] = rng.choice(({"x": "1"}, {"y": None}, None))
    elif resource is JOBS:
        for path, value in _spec(rng).items():
            *parents, last = ("spec", *path.split("."))
            node = patch
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
        if rng.random() < 0.3:
            patch["status"] = {"replicas": 7}
    elif resource is PODS and rng.random() < 0.4:
        patch["spec"] = rng.choice(({"nodeName": "n3"}, {"activeDeadlineSeconds": 100}, {"hostname": "h"}))
    elif resource is LEASES:
        patch["spec"] = {"holderIdentity": rng.choice(("p", None)), "leaseTransitions": rng.choice((1, -1))}
    return patch


def _status(rng: random.Random, resource: Resource[Any]) -> dict[str, Any]:
    if resource is PODS:
        condition = {"type": "Ready", "status": rng.choice(("True", "False"))}
        return {"phase": rng.choice(("Running", "Succeeded")), "conditions": rng.choice(([condition], []))}
    step = {"step": rng.randrange(3)}
    return rng.choice(({"replicas": 1}, {"replicas": -1}, {"replicas": None}, {"progress": step}, {"unknown": 1}))


@dataclass
class Player:
    """Sends a script to one world and writes down what came of it."""

    world: World
    transcript: list[str] = field(default_factory=list)
    refusals: dict[int, str] = field(default_factory=dict)  # by line: the message, which no two worlds have alike
    _seen: dict[tuple[str, str], list[KubeObject]] = field(default_factory=dict)

    async def play(self, requests: list[Request]) -> list[str]:
        """One line a request, then what each resource's watch told and what a list finds at the end."""
        resources: tuple[Resource[Any], ...] = (CONFIGMAPS, JOBS, PODS, LEASES)
        watched: list[list[Changed[Any]]] = []
        starts = [(await self.world.client.list(one, self.world.namespace)).resource_version for one in resources]
        for number, request in enumerate(requests):
            self.transcript.append(f"{number} {_text(request)} -> {await self._send(request)}")
        for resource, start in zip(resources, starts, strict=True):
            async with self.world.watching(resource, resource_version=start) as watcher:
                last = await self._mark(resource)
                await self.world.eventually("all was told", partial(_added, watcher, last))
                watched.append(watcher.changes)
        for resource, changes in zip(resources, watched, strict=True):
            found = (await self.world.client.list(resource, self.world.namespace)).items
            mine = (*NAMES, "last")  # a real namespace has a config map with the cluster's certificate
            self.transcript += [f"{resource.plural} has {_shown(one)}" for one in found if one.metadata.name in mine]
            self.transcript += [
                f"{resource.plural} told {one.type} {_shown(one.object)}"
                for one in changes
                if one.object.metadata.name in mine
            ]
        return self.transcript

    async def _mark(self, resource: Resource[Any]) -> str:
        """A last object, whose event says that all events have come."""
        body = _body(random.Random(0), resource, "last")
        body["metadata"].pop("finalizers", None)
        if resource is JOBS:
            body = job("last")
        await self.world.client.create(resource, self.world.namespace, body)
        return "last"

    async def _send(self, request: Request) -> str:
        try:
            answer = await self._call(request)
        except KubeError as error:
            causes = sorted({(cause.reason, cause.field) for cause in error.causes})
            self.refusals[len(self.transcript)] = str(error)
            return f"{type(error).__name__} {error.status} {causes}"
        if answer is None:
            return "done"
        if request[0] != "bind":
            self._seen.setdefault((request[1].plural, request[2]), []).append(answer)
        return _shown(answer)

    def _call(self, request: Request) -> Awaitable[Any]:
        client, place = self.world.client, self.world.namespace
        calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "create": lambda r, n, body: client.create(r, place, body),
            "get": lambda r, n: client.get(r, place, n),
            "patch": lambda r, n, body, v: client.merge_patch(
                r, place, n, body, resource_version=self._version(r, n, v)
            ),
            "status": lambda r, n, body, v: client.patch_status(
                r, place, n, body, resource_version=self._version(r, n, v)
            ),
            "replace": lambda r, n, body, v: client.replace(r, place, n, self._with_version(r, n, body, v)),
            "delete": lambda r, n, u, v, g, p: client.delete(
                r,
                place,
                n,
                uid=self._uid(r, n, u),
                resource_version=self._version(r, n, v),
                grace_seconds=g,
                propagation=p,
            ),
            "bind": lambda r, n, node: client.create(
                BINDINGS, place, {"metadata": {"name": n}, "target": {"kind": "Node", "name": node}}
            ),
            "free": lambda r, n: client.merge_patch(r, place, n, {"metadata": {"finalizers": None}}),
        }
        return calls[request[0]](*request[1:])

    def _version(self, resource: Resource[Any], name: str, wanted: str | None) -> str | None:
        seen = self._seen.get((resource.plural, name), [])
        if wanted is None or not seen:
            return None
        return (seen[-1] if wanted == "newest" else seen[0]).metadata.resource_version

    def _uid(self, resource: Resource[Any], name: str, wanted: str | None) -> str | None:
        seen = self._seen.get((resource.plural, name), [])
        if wanted is None or (wanted == "own" and not seen):
            return None
        return seen[-1].metadata.uid if wanted == "own" else NO_UID

    def _with_version(
        self, resource: Resource[Any], name: str, body: dict[str, Any], wanted: str | None
    ) -> dict[str, Any]:
        version = self._version(resource, name, wanted)
        return body if version is None else {**body, "metadata": {**body["metadata"], "resourceVersion": version}}


def _text(request: Request) -> str:
    verb, resource, *rest = request
    return f"{verb} {resource.plural} {' '.join(str(one) for one in rest)}"


def _added(watcher: Any, name: str) -> bool:
    return ("ADDED", name) in watcher.seen()


def _shown(answer: KubeObject) -> str:
    """Everything of the object that does not depend on the world."""
    meta = answer.metadata
    parts = [
        f"{meta.name} labels={_sorted(meta.labels)} annotations={meta.annotations}",
        f"finalizers={sorted(meta.finalizers)}",
        f"generation={meta.generation} deleting={meta.deletion_timestamp is not None}",
        f"grace={meta.deletion_grace_period_seconds}",
    ]
    for name in ("data", "spec", "status"):
        value = getattr(answer, name, None)
        if isinstance(value, dict):
            parts.append(f"{name}={_sorted(value)}")
    if isinstance(answer, Pod):
        conditions = [(one.type, one.status) for one in answer.status.conditions]
        parts.append(f"node={answer.spec.node_name} phase={answer.status.phase} conditions={conditions}")
    if hasattr(answer, "spec") and hasattr(answer.spec, "holder_identity"):
        parts.append(f"lease={answer.spec.holder_identity} {answer.spec.lease_transitions}")
    return " ".join(parts)


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(one) for one in value] if isinstance(value, list) else value
