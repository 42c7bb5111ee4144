"""Reads from all nodes, and from the statuses of other jobs, which nodes new pods of a job should avoid.

Most conditions of a node have names of their makers' choice, and some are true of a node that is well. So a condition
counts only if its name says that something is wrong. Reasons: ADR 0066.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from everstep.contract import labels
from everstep_operator.api.status import SuspectNode
from everstep_operator.kube.wire import Node, Taint, Unstructured
from everstep_operator.plan.snapshot import Fleet
from everstep_operator.plan.state import suspects

# Of `KernelDeadlock`, `ReadonlyFilesystem`, `FrequentKubeletRestart`, `XfsShutdown`, `GPUMissing`, … Not of pressure,
# nor of the network: taints keep pods away from those.
_FAULT = re.compile(
    r"Deadlock|Read-?only|Unhealthy|Problem|Corrupt|Fatal|Error|Fail|Fault|Missing|Broken|Degraded|Frequent|Flapping"
    r"|Inactive|FilesystemShutdown|XfsShutdown|Hung|Stuck",
    re.IGNORECASE,
)
# Conditions of node monitors that are false of a node that is not well.
_WELL = frozenset(
    {"AcceleratedHardwareReady", "KernelReady", "StorageReady", "NetworkingReady", "ContainerRuntimeReady"}
)
_KUBERNETES_OWN = re.compile(r"(?:.*\.)?kubernetes\.io/.*|hugepages-.*")
MAX_WORDS = 120  # characters of a node's own message
MAX_FAULTS = 4  # of one node
# Several jobs have to speak against a node before it is avoided by jobs that have met nothing there: nobody can take a
# node from others alone.
ACCUSERS = 2
READ_AGAIN = timedelta(seconds=10)
MAX_REQUESTS = 32  # of different templates, for which all nodes are kept


def conditions(node: Node) -> tuple[str, ...]:
    """What the node's conditions say against it, each in a few words."""
    spoken = []
    for condition in sorted(node.status.conditions, key=lambda c: c.type):
        wrong = condition.status == "False" if condition.type in _WELL else (
            condition.status == "True" and _FAULT.search(condition.type) is not None
        )  # fmt: skip
        if wrong:
            words = " ".join((condition.message or condition.reason).split())[:MAX_WORDS]
            spoken.append(condition.type + (f" ({words})" if words else ""))
    return tuple(spoken[:MAX_FAULTS])


def devices(node: Node) -> dict[str, tuple[int, int]]:
    """The devices of which the kubelet gives out fewer than the node has, because their plugin says that the others are
    not healthy: how many it gives out, and how many there are."""
    short = {}
    for name, text in node.status.capacity.items():
        if "/" not in name or _KUBERNETES_OWN.fullmatch(name) or not str(text).isdecimal():
            continue
        usable = node.status.allocatable.get(name, text)
        if str(usable).isdecimal() and int(usable) < int(text):
            short[name] = (int(usable), int(text))
    return short


def is_suspect(node: Node) -> bool:
    """Whether the node's status says anything against it."""
    return bool(conditions(node) or devices(node))


def accuses(job: Unstructured) -> bool:
    """Whether losses of the job speak against a node."""
    return bool((job.status.get("restarts") or {}).get("suspectNodes"))


class Accusers:
    """Which jobs speak against which nodes, and until when. Read again every few seconds, since it is the same for all
    jobs."""

    def __init__(self) -> None:
        self._read_at: datetime | None = None
        self._by_node: dict[str, list[tuple[datetime, str]]] = {}

    def read(self, now: datetime, jobs: Iterable[Unstructured]) -> None:
        """Take the jobs for which `accuses` holds."""
        if self._read_at is not None and _is_recent(self._read_at, now):
            return
        self._read_at, self._by_node = now, {}
        for job in jobs:
            for node in _suspects(job):
                if node.at <= now and (until := suspects.excluded_until(node, now)) is not None:
                    self._by_node.setdefault(node.name, []).append((until, job.metadata.uid))

    def against(self, job_uid: str) -> dict[str, datetime]:
        """The nodes that enough other jobs avoid, and until when."""
        ends = {}
        for name, by_job in self._by_node.items():
            others = sorted((until for until, uid in by_job if uid != job_uid), reverse=True)
            if len(others) >= ACCUSERS:
                ends[name] = others[ACCUSERS - 1]
        return ends


def _suspects(job: Unstructured) -> list[SuspectNode]:
    """Another version may have written the status."""
    listed = (job.status.get("restarts") or {}).get("suspectNodes")
    nodes = []
    for entry in listed if isinstance(listed, list) else ():
        try:
            nodes.append(SuspectNode.model_validate(entry))
        except ValidationError:
            continue
    return nodes


class AbleNodes:
    """On which nodes the pods of a template could run, and whether each is ready. Jobs that ask for the same share what
    was read, which is some seconds old at most: with thousands of nodes each reading takes milliseconds."""

    def __init__(self) -> None:
        self._by_request: dict[str, tuple[datetime, dict[str, bool]]] = {}

    def of(self, now: datetime, template: Mapping[str, Any], nodes: Callable[[], Iterable[Node]]) -> dict[str, bool]:
        spec = template.get("spec") or {}
        devices_wanted = _devices_of(spec)
        request = repr((spec.get("nodeSelector"), spec.get("tolerations"), sorted(devices_wanted)))
        if (known := self._by_request.get(request)) is not None and _is_recent(known[0], now):
            return known[1]
        able = {node.metadata.name: _is_ready(node) for node in nodes() if _fits(node, spec, devices_wanted)}
        recent = {text: entry for text, entry in self._by_request.items() if _is_recent(entry[0], now)}
        self._by_request = dict([*recent.items(), (request, (now, able))][-MAX_REQUESTS:])
        return able


def _is_recent(read_at: datetime, now: datetime) -> bool:
    return timedelta(0) <= now - read_at < READ_AGAIN


def of(
    template: Mapping[str, Any], able: Mapping[str, bool], faulty: Iterable[Node], accused: Mapping[str, datetime]
) -> Fleet:
    """The fleet as a job with this template sees it. `able`: of `AbleNodes`. `faulty`: all nodes for which `is_suspect`
    holds."""
    wanted = _devices_of(template.get("spec") or {})
    faults = {}
    for node in faulty:
        short = [f"{n} of {total} {name} are healthy" for name, (n, total) in devices(node).items() if name in wanted]
        if node.metadata.name in able and (against := (*conditions(node), *short)):
            faults[node.metadata.name] = against
    return Fleet(able, faults, accused)


def _is_ready(node: Node) -> bool:
    return any(c.type == "Ready" and c.status == "True" for c in node.status.conditions)


def _fits(node: Node, spec: Mapping[str, Any], devices_wanted: frozenset[str]) -> bool:
    """Whether the pod could run there, as far as the node's labels, taints and devices say. That it is full does not
    matter."""
    selector = spec.get("nodeSelector") or {}
    if any(node.metadata.labels.get(key) != value for key, value in selector.items()):
        return False
    if any(str(node.status.capacity.get(name, "0")) == "0" for name in devices_wanted):
        return False
    tolerations = [t for t in spec.get("tolerations") or () if isinstance(t, Mapping)]
    # What a fault or a lack of readiness sets, ends with it: a node that is out for a while still counts.
    lasting = (t for t in node.spec.taints if t.effect in ("NoSchedule", "NoExecute") and not _is_passing(t))
    return not node.spec.unschedulable and all(any(_tolerates(t, taint) for t in tolerations) for taint in lasting)


def _is_passing(taint: Taint) -> bool:
    return taint.key.startswith("node.kubernetes.io/") and taint.key != "node.kubernetes.io/unschedulable"


def _tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    if toleration.get("key") != taint.key:
        return False
    return toleration.get("operator") == "Exists" or (toleration.get("value") or "") == taint.value


def _devices_of(spec: Mapping[str, Any]) -> frozenset[str]:
    """The devices that the worker asks for, by name."""
    names: set[str] = set()
    for container in spec.get("containers") or ():
        if container.get("name") == labels.WORKER_CONTAINER:
            resources = container.get("resources") or {}
            names = {str(n) for kind in ("limits", "requests") for n in resources.get(kind) or {}}
    return frozenset(name for name in names if "/" in name and not _KUBERNETES_OWN.fullmatch(name))
