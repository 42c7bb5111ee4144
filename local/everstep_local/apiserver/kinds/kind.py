"""Describes the kinds of objects, and how the server treats each.

A `Kind` has rules, never objects. Invariant: `prepare` returns a new object or the same one, and never changes its
argument. `validate` only reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from everstep_local.apiserver.refusals import FieldError, no_such_resource
from everstep_local.apiserver.storage.store import Json, TableId
from everstep_operator.kube.resources import Resource, custom_resource
from everstep_operator.kube.wire import KubeObject, Unstructured

# Resources that clients of this cluster need in addition to the operator's own.
NAMESPACES: Resource[Unstructured] = Resource("", "v1", "namespaces", "Namespace", Unstructured, namespaced=False)
CONFIG_MAPS = custom_resource("", "v1", "configmaps", "ConfigMap", Unstructured)
SECRETS = custom_resource("", "v1", "secrets", "Secret", Unstructured)
# A scheduler assigns a pod through this client by creating one with the pod's name and `target: {kind: Node, name}`.
BINDINGS = custom_resource("", "v1", "bindings", "Binding", KubeObject)

Prepare = Callable[[Json, "Json | None"], Json]
Validate = Callable[[Json, "Json | None"], "list[FieldError]"]


def as_it_is(new: Json, _: Json | None) -> Json:
    return new


def anything(_: Json, __: Json | None) -> list[FieldError]:
    return []


@dataclass(frozen=True, slots=True)
class Scale:
    """Where a kind keeps the numbers of its scale subresource, as paths of field names."""

    replicas: tuple[str, ...]
    status_replicas: tuple[str, ...]
    selector: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """One resource as the server serves it.

    `counts`: the part of the object whose changes raise metadata.generation; None: no part. `typed`: a null is an
    absent field. `status_metadata`: whether a write to the status subresource may change labels and annotations.
    """

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    typed: bool = True
    has_status: bool = False
    status_on_create: bool = False
    status_metadata: bool = True
    counts: Callable[[Json], Any] | None = None
    unconditional_update: bool = True
    create_on_update: bool = False
    graceful: bool = False
    scale: Scale | None = None
    prepare: Prepare = as_it_is
    validate: Validate = anything
    name_errors: Callable[[str], list[str]] = lambda _: []

    @property
    def id(self) -> TableId:
        return (self.group, self.plural)

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full_plural(self) -> str:
        """The plural as in messages: `trainingjobs.everstep.dev`, `pods`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def full_kind(self) -> str:
        """The kind as in messages: `TrainingJob.everstep.dev`, `Pod`. Events always appear as those of the core
        group."""
        return f"{self.kind}.{self.group}" if self.group and self.kind != "Event" else self.kind


class Kinds:
    """The kinds that one cluster serves."""

    def __init__(self, kinds: Iterable[Kind]) -> None:
        self._kinds = {kind.id: kind for kind in kinds}

    def install(self, kind: Kind) -> None:
        self._kinds[kind.id] = kind

    def of(self, resource: Resource[Any]) -> Kind:
        """The kind of a resource. Raises Refusal (404) if it is not served."""
        kind = self._kinds.get((resource.group, resource.plural))
        if kind is None or kind.version != resource.version:
            raise no_such_resource()
        return kind

    def at(self, table: TableId) -> Kind:
        return self._kinds[table]

    def named(self, kind: str, api_version: str) -> Kind | None:
        return next((k for k in self._kinds.values() if k.kind == kind and k.api_version == api_version), None)
