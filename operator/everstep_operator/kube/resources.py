"""Describes the resources of the API, and how each is reached and decoded.

A `Resource` is all that the client knows about a kind: path, names and the shape to decode. The owner of a CRD makes
one for it with `custom_resource`.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import quote

from everstep_operator.kube import wire

T = TypeVar("T", bound=wire.KubeObject)


@dataclass(frozen=True, slots=True)
class Resource(Generic[T]):
    """One kind at the API server; `group` is empty for the core group."""

    group: str
    version: str
    plural: str
    kind: str
    struct: type[T]
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The value of an object's `apiVersion`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """The URL path. `namespace=None` on a namespaced resource means all namespaces, for list and watch only."""
        if namespace is not None and not self.namespaced:
            raise ValueError(f"{self.plural} have no namespace; call with namespace=None instead of {namespace!r}")
        if name is not None and namespace is None and self.namespaced:
            raise ValueError(f"one of the {self.plural} is named {name!r} in every namespace; give the namespace")
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts += [self.plural, *([name] if name is not None else []), *([subresource] if subresource else [])]
        return "/" + "/".join(quote(part, safe="") for part in parts)


PODS = Resource("", "v1", "pods", "Pod", wire.Pod)
SERVICES = Resource("", "v1", "services", "Service", wire.Service)
CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap", wire.ConfigMap)
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", wire.Unstructured)
NODES = Resource("", "v1", "nodes", "Node", wire.Node, namespaced=False)
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease", wire.Lease)
EVENTS = Resource("events.k8s.io", "v1", "events", "Event", wire.Event)
PDBS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", wire.PodDisruptionBudget)
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", wire.NetworkPolicy)
# Of the schedulers that place pods together or not at all, by their names in `spec.scheduling.podGroup.scheduler`.
POD_GROUPS = {
    scheduler: Resource(group, version, "podgroups", "PodGroup", wire.Unstructured)
    for scheduler, group, version in (
        ("Kubernetes", "scheduling.k8s.io", "v1beta1"),
        ("Coscheduling", "scheduling.x-k8s.io", "v1alpha1"),
        ("Volcano", "scheduling.volcano.sh", "v1beta1"),
    )
}


PRIORITY_CLASSES = Resource(
    "scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", wire.PriorityClass, namespaced=False
)
# Of Kueue.
QUEUES = "kueue.x-k8s.io"
WORKLOADS = Resource(QUEUES, "v1beta2", "workloads", "Workload", wire.Unstructured)
FLAVORS = Resource(QUEUES, "v1beta2", "resourceflavors", "ResourceFlavor", wire.Unstructured, namespaced=False)
WORKLOAD_PRIORITY_CLASSES = Resource(
    QUEUES, "v1beta2", "workloadpriorityclasses", "WorkloadPriorityClass", wire.PriorityClass, namespaced=False
)


def custom_resource(group: str, version: str, plural: str, kind: str, struct: type[T]) -> Resource[T]:
    """The descriptor of a namespaced CRD; `struct` is usually `wire.Unstructured` or a subclass of `KubeObject`."""
    return Resource(group, version, plural, kind, struct)
