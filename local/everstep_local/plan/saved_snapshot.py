"""Takes all objects of one job from an API server, keeps them in a file, and makes the planner's snapshot from them.

The objects are kept in the API server's form, so a file goes through the same code as the operator's caches. Invariant:
nothing here writes to a cluster, and a kept file contains no values of the template's environment variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from everstep.contract import labels, private, redact
from everstep.contract.document import DocumentInvalid, decode
from everstep_operator import object_names
from everstep_operator.api.base import SpecError
from everstep_operator.api.parse import parse_spec
from everstep_operator.api.types import GangScheduler
from everstep_operator.controller import observe
from everstep_operator.controller.progress import JobProgress
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import Forbidden, NotFound
from everstep_operator.kube.resources import CONFIGMAPS, NODES, PDBS, POD_GROUPS, PODS, SERVICES, Resource
from everstep_operator.kube.wire import (
    ConfigMap,
    KubeObject,
    Node,
    Pod,
    PodDisruptionBudget,
    Service,
    Unstructured,
    Wire,
    controller_uid,
    to_body,
)
from everstep_operator.main import JOBS
from everstep_operator.plan.snapshot import NodeHealth, NodeView, Settings, Snapshot
from everstep_operator.plan.state import pod_hash
from everstep_operator.round_view import RoundView
from everstep_operator.rounds.agent_lookup import BACKEND, rendezvous_backend
from everstep_operator.rounds.documents import KEY, config_map_name
from everstep_operator.rounds.rules import round_view

T = TypeVar("T", bound=KubeObject)

FORMAT = "everstep-plan-snapshot/1"
MAX_BYTES = 64 * 1024 * 1024
MIN_VALUE = 4  # characters; a shorter value of a variable occurs inside ordinary words


class SnapshotError(Exception):
    """The snapshot cannot be taken, read or used. The text says what to do."""


class JobObjects(Wire, frozen=True, kw_only=True):
    """The objects of one job at one moment. `cluster`: a text that says where they are from."""

    format: str = ""
    taken_at: datetime
    cluster: str = ""
    job: Unstructured
    pods: tuple[Pod, ...] = ()
    nodes: tuple[Node, ...] = ()
    nodes_hidden: bool = False  # the user who took it may not read nodes
    service: Service | None = None
    budget: PodDisruptionBudget | None = None
    pod_group: Unstructured | None = None
    rounds: ConfigMap | None = None


async def read_objects(client: KubeClient, namespace: str, name: str, *, now: datetime, cluster: str) -> JobObjects:
    """Read a job and its objects. Raises SnapshotError, KubeError."""
    try:
        job = await client.get(JOBS, namespace, name)
    except NotFound as e:
        raise SnapshotError(
            f"no TrainingJob {name} in namespace {namespace} of {cluster}: give its namespace with --namespace"
        ) from e
    uid = job.metadata.uid
    listed = await client.list(PODS, namespace, label_selector=object_names.selector(name))
    pods = tuple(pod for pod in listed.items if controller_uid(pod.metadata) == uid)
    nodes, hidden = await _nodes(client, pods)
    return JobObjects(
        format=FORMAT,
        taken_at=now,
        cluster=cluster,
        job=job,
        pods=pods,
        nodes=nodes,
        nodes_hidden=hidden,
        service=await _own(client, SERVICES, namespace, object_names.service_name(name), uid),
        budget=await _own(client, PDBS, namespace, object_names.service_name(name), uid),
        pod_group=await _pod_group(client, namespace, job),
        rounds=await _own(client, CONFIGMAPS, namespace, config_map_name(name), uid),
    )


async def _nodes(client: KubeClient, pods: tuple[Pod, ...]) -> tuple[tuple[Node, ...], bool]:
    nodes = []
    for name in sorted({pod.spec.node_name for pod in pods if pod.spec.node_name}):
        try:
            nodes.append(await client.get(NODES, None, name))
        except NotFound:
            continue
        except Forbidden:
            return (), True
    return tuple(nodes), False


async def _pod_group(client: KubeClient, namespace: str, job: Unstructured) -> Unstructured | None:
    """The PodGroup for which the job asks, if it is there and may be read."""
    scheduler = ((job.spec.get("scheduling") or {}).get("podGroup") or {}).get("scheduler")
    if scheduler not in POD_GROUPS:
        return None
    try:
        name = object_names.service_name(job.metadata.name)
        return await _own(client, POD_GROUPS[scheduler], namespace, name, job.metadata.uid)
    except Forbidden:
        return None


async def _own(client: KubeClient, resource: Resource[T], namespace: str, name: str, uid: str) -> T | None:
    try:
        candidate = await client.get(resource, namespace, name)
    except NotFound:
        return None
    return candidate if controller_uid(candidate.metadata) == uid else None


def snapshot(objects: JobObjects) -> Snapshot:
    """The snapshot from which a newly started operator would plan. Raises SnapshotError, SpecError."""
    job = observe.job_view(objects.job)
    pods = tuple(worker for pod in objects.pods if (worker := observe.worker_pod(pod)) is not None)
    nodes = {node.metadata.name: observe.node_view(node) for node in objects.nodes}
    group = job.spec.pod_group
    seen = None if group is None else observe.pod_group_view(objects.pod_group, job.uid, group.scheduler)
    if objects.nodes_hidden:
        nodes = {pod.node: NodeView(pod.node, NodeHealth.READY) for pod in pods if pod.node}
    return Snapshot(
        now=objects.taken_at,
        job=job,
        pods=tuple(sorted(pods, key=lambda pod: pod.name)),
        service_uid=objects.service.metadata.uid if objects.service is not None else None,
        disruption_budget=observe.disruption_budget_view(objects.budget, job.uid)
        if objects.budget is not None
        else None,
        pod_groups=() if seen is None else (seen,),
        # Whoever asks may not read what this installation does.
        settings=Settings(pod_groups=frozenset(GangScheduler), volume_claims=True),
        nodes=nodes,
        fleet=None,
        progress=JobProgress(job.status, objects.taken_at).snapshot(),
        world=_round(objects) if rendezvous_backend(objects.job) == BACKEND else None,
    )


def _round(objects: JobObjects) -> RoundView:
    text = "" if objects.rounds is None else objects.rounds.data.get(KEY, "")
    if not text:
        return RoundView(0)
    try:
        return round_view(decode(text.encode()))
    except DocumentInvalid as e:
        name = config_map_name(objects.job.metadata.name)
        raise SnapshotError(f"ConfigMap {name} holds no round document that this version can read: {e}") from e


def save(objects: JobObjects, path: Path) -> None:
    """Write it for `load`, readable by its owner only. Raises SnapshotError."""
    body = to_body(objects)
    before = _spec_hash(body["job"])
    hidden = _hide_values(body["job"].get("spec", {}).get("template") or {})
    body["job"]["metadata"].pop("annotations", None)  # kubectl stores the whole manifest there
    body["pods"] = _without(body.get("pods", []), hidden)
    for pod in body["pods"]:
        # The hash is of the variables too: those that are hidden must not make a pod look outdated.
        marks = pod["metadata"].get("labels") or {}
        if before is not None and marks.get(labels.SPEC_HASH) == before:
            marks[labels.SPEC_HASH] = _spec_hash(body["job"])
    try:
        private.write(path, msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")
    except OSError as e:
        raise SnapshotError(f"{path}: cannot be written: {e.strerror}") from e


def _spec_hash(job: Mapping[str, Any]) -> str | None:
    """What a pod made from this job's spec is marked with; None if this version refuses the spec."""
    try:
        return pod_hash.of_spec(parse_spec(job.get("spec") or {}))
    except SpecError:
        return None


def load(path: Path) -> JobObjects:
    """Raises SnapshotError naming the file and what is wrong in it."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SnapshotError(f"{path}: larger than {MAX_BYTES >> 20} MiB: this is no snapshot of one job")
        objects = msgspec.json.decode(path.read_bytes(), type=JobObjects)
    except OSError as e:
        raise SnapshotError(f"{path}: cannot be read: {e.strerror}") from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise SnapshotError(f"{path}: this is no snapshot: {e}; write one with `everstep plan JOB --save FILE`") from e
    if objects.format != FORMAT:
        raise SnapshotError(f"{path}: format {objects.format!r}; this version reads {FORMAT!r}")
    if objects.taken_at.tzinfo is None:
        raise SnapshotError(f"{path}: takenAt {objects.taken_at} has no time zone; end it with Z")
    return objects


def _hide_values(template: Mapping[str, Any]) -> tuple[str, ...]:
    """Replace the values of the containers' variables, on which no decision depends. Returns the values, longest first,
    so that none hides a part of another.
    """
    spec = template.get("spec") or {}
    values = set()
    for container in [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]:
        for variable in container.get("env") or ():
            if variable.get("value") is not None:
                values.add(str(variable["value"]))
                variable["value"] = redact.HIDDEN
    return tuple(sorted((v for v in values if len(v) >= MIN_VALUE), key=lambda v: (-len(v), v)))


def _without(value: Any, hidden: tuple[str, ...], key: str = "") -> Any:
    """`value` with these texts hidden in every message, because failing programs often print their variables."""
    match value:
        case dict():
            return {k: _without(inner, hidden, k) for k, inner in value.items()}
        case list():
            return [_without(inner, hidden, key) for inner in value]
        case str() if key == "message":
            for text in hidden:
                value = value.replace(text, redact.HIDDEN)
            return redact.text(value)
    return value
