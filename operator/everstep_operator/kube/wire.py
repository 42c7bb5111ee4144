"""The narrow shapes that are decoded from the API server's JSON.

Only the fields that the operator reads exist here. The decoder skips all others without an allocation, so 10,000 pods
need only 34 MB. Objects are immutable, so a cache may hand them out. Times are aware UTC datetimes. Invariant: every
list is a tuple, and an absent list or map reads as empty. No value can refer to itself, so the garbage collector does
not track them: visiting all of them would stop the operator, and its renewal of the Lease.
"""

from datetime import UTC, datetime
from typing import Any

import msgspec


class Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, gc=False):
    """Base of all shapes: camelCase on the wire, unknown fields ignored, immutable."""


class OwnerReference(Wire, frozen=True, kw_only=True):
    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class ObjectMeta(Wire, frozen=True, kw_only=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: tuple[OwnerReference, ...] = ()
    finalizers: tuple[str, ...] = ()
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    deletion_grace_period_seconds: int | None = None


class KubeObject(Wire, frozen=True, kw_only=True):
    """Anything with metadata. `key` is (namespace, name), the identity within one resource."""

    metadata: ObjectMeta = ObjectMeta()

    @property
    def key(self) -> tuple[str, str]:
        return (self.metadata.namespace, self.metadata.name)


class Condition(Wire, frozen=True, kw_only=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class InitContainer(Wire, frozen=True, kw_only=True):
    name: str = ""
    restart_policy: str | None = None  # Always: a native side-car


class PodSpec(Wire, frozen=True, kw_only=True):
    node_name: str = ""
    active_deadline_seconds: int | None = None
    init_containers: tuple[InitContainer, ...] = ()


class ContainerWaiting(Wire, frozen=True, kw_only=True):
    reason: str = ""
    message: str = ""


class ContainerTerminated(Wire, frozen=True, kw_only=True):
    exit_code: int = 0
    reason: str = ""
    message: str = ""
    started_at: datetime | None = None
    finished_at: datetime | None = None


class ContainerRunning(Wire, frozen=True, kw_only=True):
    started_at: datetime | None = None


class ContainerState(Wire, frozen=True, kw_only=True):
    """At most one is set."""

    waiting: ContainerWaiting | None = None
    running: ContainerRunning | None = None
    terminated: ContainerTerminated | None = None


class ContainerStatus(Wire, frozen=True, kw_only=True):
    name: str = ""
    ready: bool = False
    started: bool | None = None  # whether its start-up probe has succeeded
    restart_count: int = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class PodStatus(Wire, frozen=True, kw_only=True):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    start_time: datetime | None = None


class Pod(KubeObject, frozen=True, kw_only=True):
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class NodeStatus(Wire, frozen=True, kw_only=True):
    conditions: tuple[Condition, ...] = ()
    capacity: dict[str, str | int] = {}
    allocatable: dict[str, str | int] = {}


class Taint(Wire, frozen=True, kw_only=True):
    key: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(Wire, frozen=True, kw_only=True):
    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False


class Node(KubeObject, frozen=True, kw_only=True):
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Service(KubeObject, frozen=True, kw_only=True):
    """A Service: only its existence and its owner matter."""


class ConfigMap(KubeObject, frozen=True, kw_only=True):
    data: dict[str, str] = {}


class PodDisruptionBudgetSpec(Wire, frozen=True, kw_only=True):
    min_available: int | str | None = None


class PodDisruptionBudget(KubeObject, frozen=True, kw_only=True):
    spec: PodDisruptionBudgetSpec = PodDisruptionBudgetSpec()


class NetworkPolicy(KubeObject, frozen=True, kw_only=True):
    """A NetworkPolicy: only its existence, its owner and its annotations matter."""


class PriorityClass(KubeObject, frozen=True, kw_only=True):
    """Also Kueue's WorkloadPriorityClass, which has no default of the cluster."""

    value: int = 0
    global_default: bool = False


class LeaseSpec(Wire, frozen=True, kw_only=True):
    holder_identity: str | None = ""
    lease_duration_seconds: int | None = None
    acquire_time: datetime | None = None
    renew_time: datetime | None = None
    lease_transitions: int | None = None


class Lease(KubeObject, frozen=True, kw_only=True):
    spec: LeaseSpec = LeaseSpec()


class ObjectReference(Wire, frozen=True, kw_only=True):
    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""


class EventSeries(Wire, frozen=True, kw_only=True):
    count: int = 1
    last_observed_time: datetime | None = None


class Event(KubeObject, frozen=True, kw_only=True):
    """events.k8s.io/v1."""

    type: str = ""
    reason: str = ""
    note: str = ""
    regarding: ObjectReference = ObjectReference()
    series: EventSeries | None = None
    event_time: datetime | None = None
    deprecated_last_timestamp: datetime | None = None  # of what writes core/v1 events, such as the kubelet


class Unstructured(KubeObject, frozen=True, kw_only=True):
    """An object of a CRD: metadata narrow, the rest as plain JSON values that the owner of the CRD validates.

    The dicts are shared with every reader of a cache: read only.
    """

    spec: dict[str, Any] = {}
    status: dict[str, Any] = {}


def to_body(value: Wire) -> dict[str, Any]:
    """The JSON value of `value` without its defaults, as `create` and `replace` take it."""
    # This goes through JSON, because to_builtins would keep tuples, which no other code expects in a body.
    body = msgspec.json.decode(msgspec.json.encode(value))
    assert isinstance(body, dict)
    return body


def controller_uid(meta: ObjectMeta) -> str | None:
    """The UID of the controlling owner, the only one that may adopt."""
    return next((owner.uid for owner in meta.owner_references if owner.controller), None)


def controller_of(meta: ObjectMeta) -> tuple[str, str] | None:
    """Kind and name of the controlling owner."""
    return next(((owner.kind, owner.name) for owner in meta.owner_references if owner.controller), None)


def micro_time(moment: datetime) -> str:
    """`moment` as a Kubernetes MicroTime, whose parser requires exactly six digits."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def rfc3339(moment: datetime) -> str:
    """`moment` as a Kubernetes Time: whole seconds, as conditions carry it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
