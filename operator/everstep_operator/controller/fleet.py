"""Reads from all nodes, and from the statuses of other jobs, which nodes new pods of a job should avoid.

Most conditions of a node have names of their makers' choice, and some are true of a node that is well. So a condition
counts only if its name says that something is wrong. Reasons: ADR 0066.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from everstep.contract import labels
from everstep_operator.api.parse import parse_status
from everstep_operator.api.status import SuspectNode
from everstep_operator.kube.wire import Node, ObjectMeta, Taint, Unstructured
from everstep_operator.plan.snapshot import Fleet
from everstep_operator.plan.state import suspects

# Words in `KernelDeadlock`, `ReadonlyFilesystem`, `FrequentKubeletRestart`, `XfsShutdown`, `GPUMissing`, … Not of
# pressure, nor of the network: taints keep pods away from those. A word begins with a capital, or behind a sign:
# `DefaultRoute` has no fault.
_WORDS_OF_FAULTS = (
    "Deadlock|Read-?[Oo]nly|Unhealthy|Problem|Corrupt|Fatal|Error|Fail(?!over)|Fault|Missing|Broken|Degraded|Frequent"
    "|Flapping|Inactive|FilesystemShutdown|XfsShutdown|Hung|Stuck"
)
_FAULT = re.compile(rf"{_WORDS_OF_FAULTS}|(?<![A-Za-z])(?i:{_WORDS_OF_FAULTS})")
# Of `ErrorFree`, `NoProblems`, `FaultToleranceEnabled`, which are true of a node that is well.
_NO_FAULT = re.compile(r"Free|Tolera|Enabled|Ready|(?:^|[^A-Za-z])No(?=[A-Z])|Without")
# Conditions of node monitors that are false of a node that is not well.
_WELL = frozenset(
    {"AcceleratedHardwareReady", "KernelReady", "StorageReady", "NetworkingReady", "ContainerRuntimeReady"}
)
_KUBERNETES_OWN = re.compile(r"(?:.*\.)?kubernetes\.io/.*|hugepages-.*")
MAX_WORDS = 120  # characters of a node's own message
MAX_FAULTS = 4  # of one node
# So many have to speak against a node before jobs avoid it that have met nothing there. Each other job of the same
# namespace is one, and each other namespace: its jobs may all be one tenant's, who shall not take a node from others.
ACCUSERS = 2
READ_AGAIN = timedelta(seconds=10)
MAX_REQUESTS = 32  # of different templates, for which all nodes are kept


def conditions(node: Node) -> tuple[str, ...]:
    """What the node's conditions say against it, each in a few words."""
    spoken = []
    for condition in sorted(node.status.conditions, key=lambda c: c.type):
        wrong = condition.status == "False" if condition.type in _WELL else (
            condition.status == "True" and _names_a_fault(condition.type)
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


def _names_a_fault(condition: str) -> bool:
    return _FAULT.search(condition) is not None and _NO_FAULT.search(condition) is None


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
        self._by_node: dict[str, list[tuple[datetime, ObjectMeta]]] = {}

    def read(self, now: datetime, jobs: Iterable[Unstructured]) -> None:
        """Take the jobs for which `accuses` holds."""
        if self._read_at is not None and _is_recent(self._read_at, now):
            return
        self._read_at, self._by_node = now, {}
        for job in jobs:
            for node in _suspects(job):
                if node.at <= now and (until := suspects.excluded_until(node, now)) is not None:
                    self._by_node.setdefault(node.name, []).append((until, job.metadata))

    def against(self, job_uid: str, namespace: str) -> dict[str, datetime]:
        """The nodes that enough others than this job avoid, and until when."""
        ends = {}
        for name, by_job in self._by_node.items():
            others: dict[str, datetime] = {}
            for until, job in by_job:
                if job.uid != job_uid:
                    accuser = job.uid if job.namespace == namespace else f"namespace {job.namespace}"
                    others[accuser] = max(until, others.get(accuser, until))
            if len(others) >= ACCUSERS:
                ends[name] = sorted(others.values(), reverse=True)[ACCUSERS - 1]
        return ends


def _suspects(job: Unstructured) -> tuple[SuspectNode, ...]:
    """Another version may have written the status: what is not known of an entry is left out, not the entry."""
    listed = (job.status.get("restarts") or {}).get("suspectNodes")
    return parse_status({"restarts": {"suspectNodes": listed}}).restarts.suspect_nodes


class AbleNodes:
    """On which nodes the pods of a template could run, and whether each is ready. Jobs that ask for the same share what
    was read, which is some seconds old at most: with thousands of nodes each reading takes milliseconds."""

    def __init__(self) -> None:
        self._by_request: dict[str, tuple[datetime, dict[str, bool]]] = {}

    def of(self, now: datetime, template: Mapping[str, Any], nodes: Callable[[], Iterable[Node]]) -> dict[str, bool]:
        spec = template.get("spec") or {}
        devices_wanted = _devices_of(spec)
        placement = [spec.get(key) for key in ("nodeSelector", "nodeName", "affinity", "tolerations")]
        request = repr((placement, sorted(devices_wanted)))
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
    """Whether the pod could run there, as far as the node's name, labels, taints and devices say. That it is full does
    not matter."""
    if spec.get("nodeName") not in (None, "", node.metadata.name) or not _is_selected(node, spec):
        return False
    selector = spec.get("nodeSelector") or {}
    if any(node.metadata.labels.get(key) != value for key, value in selector.items()):
        return False
    if any(str(node.status.capacity.get(name, "0")) == "0" for name in devices_wanted):
        return False
    tolerations = [t for t in spec.get("tolerations") or () if isinstance(t, Mapping)]
    # What a fault or a lack of readiness sets, ends with it: a node that is out for a while still counts.
    lasting = (t for t in node.spec.taints if t.effect in ("NoSchedule", "NoExecute") and not _is_passing(t))
    return not node.spec.unschedulable and all(any(_tolerates(t, taint) for t in tolerations) for taint in lasting)


def _is_selected(node: Node, spec: Mapping[str, Any]) -> bool:
    """Whether a required node affinity, which only the API server has checked, admits the node."""
    required: Any = spec
    for key in ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"):
        required = required.get(key) if isinstance(required, Mapping) else None
    if not isinstance(required, list):
        return True
    own = {"metadata.name": node.metadata.name}
    return any(
        isinstance(term, Mapping)
        and bool(term.get("matchExpressions") or term.get("matchFields"))
        and all(_matches(e, node.metadata.labels) for e in term.get("matchExpressions") or ())
        and all(_matches(e, own) for e in term.get("matchFields") or ())
        for term in required
    )


def _matches(requirement: Mapping[str, Any], labels_of_node: Mapping[str, str]) -> bool:
    value = labels_of_node.get(str(requirement.get("key")))
    values = [str(each) for each in requirement.get("values") or ()]
    match requirement.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            if value is None or not value.isdecimal() or len(values) != 1 or not values[0].isdecimal():
                return False
            return int(value) > int(values[0]) if operator == "Gt" else int(value) < int(values[0])
        case _:
            return False


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
