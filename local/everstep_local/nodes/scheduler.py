"""Binds pods to nodes: a small part of kube-scheduler, which is enough for training jobs.

A pod goes to a node that it does not avoid, if there is room; then to the node with the fewest pods of its own owner,
then with the fewest of all, then by name. Readiness, taints (without tolerations), `nodeSelector` and capacity count;
of affinity only a preference against nodes by name; spread constraints do not. Invariants: `choose_node` is pure. A pod
that was just bound counts before the cache shows it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from everstep_local.kubelet.sources import PODS
from everstep_local.nodes.resources import lacking, quantity, requests_of
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import Conflict, KubeError, NotFound
from everstep_operator.kube.resources import Resource
from everstep_operator.kube.wire import KubeObject, Unstructured, controller_uid, rfc3339
from everstep_operator.runtime.clock import Clock, wait_event
from everstep_operator.runtime.informer import Informer

log = logging.getLogger(__name__)

# To bind a pod is to create one of these with the pod's name.
BINDINGS = Resource("", "v1", "bindings", "Binding", KubeObject)
RETRY_SECONDS = 1.0
FINISHED = ("Succeeded", "Failed")


@dataclass(slots=True)
class Seat:
    """One node as the scheduler sees it, with its pods: (owner's UID, requested resources)."""

    name: str
    capacity: Mapping[str, Fraction]
    labels: Mapping[str, str] = field(default_factory=dict)
    obstacle: str = ""  # why no pod may go there
    pods: list[tuple[str | None, Mapping[str, Fraction]]] = field(default_factory=list)


def choose_node(pod: Unstructured, seats: Sequence[Seat]) -> Seat | str:
    """The node for `pod`, or why there is none, in kube-scheduler's words."""
    try:
        wanted = requests_of(pod.spec)
    except ValueError as e:
        return f"0/{len(seats)} nodes are available: {e}"
    selector: Mapping[str, str] = pod.spec.get("nodeSelector") or {}
    reasons: Counter[str] = Counter()
    fitting = []
    for seat in seats:
        if seat.obstacle:
            reasons[seat.obstacle] += 1
        elif any(seat.labels.get(key) != value for key, value in selector.items()):
            reasons["node(s) didn't match Pod's node affinity/selector"] += 1
        elif short := lacking(seat.capacity, (requests for _, requests in seat.pods), wanted):
            for name in short:
                reasons["Too many pods" if name == "pods" else f"Insufficient {name}"] += 1
        else:
            fitting.append(seat)
    if not fitting:
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        return f"0/{len(seats)} nodes are available: {why or 'no nodes'}."
    owner = controller_uid(pod.metadata)
    avoided = _avoided(pod)
    return min(
        fitting,
        key=lambda s: (
            s.name in avoided,
            sum(owner is not None and o == owner for o, _ in s.pods),
            len(s.pods),
            s.name,
        ),
    )


def _avoided(pod: Unstructured) -> set[str]:
    """The nodes that the pod prefers not to run on."""
    affinity = (pod.spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
    fields = (field for term in terms for field in (term.get("preference") or {}).get("matchFields") or ())
    return {value for field in fields if field.get("operator") == "NotIn" for value in field.get("values") or ()}


class Scheduler:
    """The scheduler. `nudge` it whenever a pod or a node has changed."""

    def __init__(
        self, client: KubeClient, pods: Informer[Unstructured], nodes: Informer[Unstructured], clock: Clock
    ) -> None:
        self._client = client
        self._pods = pods
        self._nodes = nodes
        self._clock = clock
        self._bound: dict[str, str] = {}  # pod UID to node, until the cache shows it
        self._changed = asyncio.Event()

    def nudge(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        await self._pods.wait_synced()
        await self._nodes.wait_synced()
        failed = False
        while True:
            if not failed:
                await self._changed.wait()
            else:
                await wait_event(self._clock, self._changed, RETRY_SECONDS)
            self._changed.clear()
            failed = not await self._pass()

    async def _pass(self) -> bool:
        """Look at every unbound pod, the oldest first; whether all writes succeeded."""
        pods = self._pods.list()
        shown = {p.metadata.uid for p in pods if p.spec.get("nodeName")}
        alive = {p.metadata.uid for p in pods}
        self._bound = {uid: node for uid, node in self._bound.items() if uid in alive - shown}
        seats = self._seats(pods)
        waiting = [p for p in pods if _is_waiting(p) and p.metadata.uid not in self._bound]
        well = True
        for pod in sorted(waiting, key=lambda p: (p.metadata.creation_timestamp is None, _age(p), p.key)):
            try:
                match choose_node(pod, list(seats.values())):
                    case Seat() as seat:
                        await self._bind(pod, seat)
                    case str() as reason:
                        await self._refuse(pod, reason)
            except (NotFound, Conflict):
                continue  # gone or bound meanwhile: its event comes
            except KubeError as e:
                well = False
                log.warning("pod not scheduled yet", extra={"pod": pod.metadata.name, "error": str(e)})
        return well

    async def _bind(self, pod: Unstructured, seat: Seat) -> None:
        meta = pod.metadata
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": meta.name, "namespace": meta.namespace, "uid": meta.uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": seat.name},
        }
        await self._client.create(BINDINGS, meta.namespace, body)
        self._bound[meta.uid] = seat.name
        seat.pods.append((controller_uid(meta), requests_of(pod.spec)))

    async def _refuse(self, pod: Unstructured, reason: str) -> None:
        conditions = pod.status.get("conditions") or ()
        before = next((c for c in conditions if c.get("type") == "PodScheduled"), None)
        condition: dict[str, Any] = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": reason,
            "lastTransitionTime": rfc3339(self._clock.now()),
        }
        if before is not None and before.get("status") == "False":
            if before.get("message") == reason:
                return
            condition["lastTransitionTime"] = before.get("lastTransitionTime") or condition["lastTransitionTime"]
        others = [c for c in conditions if c.get("type") != "PodScheduled"]
        meta = pod.metadata
        status = {"phase": "Pending", "conditions": [*others, condition]}
        await self._client.patch_status(PODS, meta.namespace, meta.name, status, resource_version=meta.resource_version)

    def _seats(self, pods: Sequence[Unstructured]) -> dict[str, Seat]:
        seats = {}
        for node in self._nodes.list():
            stated = node.status.get("allocatable") or node.status.get("capacity") or {}
            capacity = {name: quantity(text) for name, text in stated.items()}
            seats[node.metadata.name] = Seat(node.metadata.name, capacity, node.metadata.labels, obstacle(node))
        for pod in pods:
            node_name = pod.spec.get("nodeName") or self._bound.get(pod.metadata.uid)
            if node_name in seats and pod.status.get("phase") not in FINISHED:
                seats[node_name].pods.append((controller_uid(pod.metadata), _requests(pod)))
        return seats


def _requests(pod: Unstructured) -> Mapping[str, Fraction]:
    try:
        return requests_of(pod.spec)
    except ValueError:
        return {"pods": Fraction(1)}


def _age(pod: Unstructured) -> float:
    made = pod.metadata.creation_timestamp
    return made.timestamp() if made is not None else 0.0


def _is_waiting(pod: Unstructured) -> bool:
    return (
        not pod.spec.get("nodeName")
        and pod.metadata.deletion_timestamp is None
        and pod.status.get("phase") not in FINISHED
        and not pod.spec.get("schedulingGates")
        and pod.spec.get("schedulerName", "default-scheduler") == "default-scheduler"
    )


def obstacle(node: Unstructured) -> str:
    """Why no pod may go to the node; empty if one may."""
    for taint in node.spec.get("taints") or ():
        if taint.get("effect") in ("NoSchedule", "NoExecute"):
            return f"node(s) had untolerated taint {{{taint.get('key')}: {taint.get('value') or ''}}}"
    if node.spec.get("unschedulable"):
        return "node(s) were unschedulable"
    conditions = node.status.get("conditions") or ()
    ready: Mapping[str, Any] = next((c for c in conditions if c.get("type") == "Ready"), {})
    return "" if ready.get("status") == "True" else "node(s) were not ready"
