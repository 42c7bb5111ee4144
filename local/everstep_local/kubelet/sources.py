"""Reads values for a pod from Secrets, ConfigMaps and its own fields.

Invariant: a missing value raises `NotStartable` with the object and key, and never becomes an empty string.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import NotFound
from everstep_operator.kube.resources import Resource
from everstep_operator.kube.wire import KubeObject, Unstructured

HOST_IP = "127.0.0.1"


class Keyed(KubeObject, frozen=True, kw_only=True):
    """A Secret (values in base64) or a ConfigMap (text, and base64 in `binary_data`)."""

    data: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    binary_data: dict[str, str] = {}  # noqa: RUF012
    string_data: dict[str, str] = {}  # noqa: RUF012


PODS = Resource("", "v1", "pods", "Pod", Unstructured)
SECRETS = Resource("", "v1", "secrets", "Secret", Keyed)
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap", Keyed)


class NotStartable(Exception):
    """A container cannot start now. This becomes its waiting state, and the start is tried again."""

    reason = "CreateContainerConfigError"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True, slots=True)
class PodFacts:
    """The fields of the pod that its containers may read."""

    pod: Unstructured
    pod_ip: str

    def field(self, path: str) -> str:
        """The value of a fieldRef. Raises NotStartable for a path that a pod does not have."""
        meta, spec = self.pod.metadata, self.pod.spec
        match path:
            case "metadata.name":
                return meta.name
            case "metadata.namespace":
                return meta.namespace
            case "metadata.uid":
                return meta.uid
            case "metadata.labels":
                return _listed(meta.labels)
            case "metadata.annotations":
                return _listed(meta.annotations)
            case "spec.nodeName":
                return str(spec.get("nodeName", ""))
            case "spec.serviceAccountName":
                return str(spec.get("serviceAccountName", "default"))
            case "status.podIP" | "status.podIPs":
                return self.pod_ip
            case "status.hostIP" | "status.hostIPs":
                return HOST_IP
        if (match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)) is not None:
            return (meta.labels if match[1] == "labels" else meta.annotations).get(match[2], "")
        raise NotStartable(f"fieldRef {path!r} is not a field that a container can have; remove it")


def _listed(entries: Mapping[str, str]) -> str:
    return "\n".join(f'{key}="{value}"' for key, value in sorted(entries.items()))


class Sources:
    """The Secrets and ConfigMaps of one namespace, each read once. Make a new one for every attempt to start a pod."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._read: dict[tuple[str, str], dict[str, bytes] | None] = {}

    async def values(self, ref: Mapping[str, Any], *, secret: bool) -> dict[str, bytes]:
        """All keys of the object that `ref.name` names; empty if it is missing and optional. Raises KubeError."""
        kind, name = "secret" if secret else "configmap", str(ref.get("name") or ref.get("secretName") or "")
        if (kind, name) not in self._read:
            self._read[kind, name] = await self._get(SECRETS if secret else CONFIG_MAPS, name, secret)
        existing = self._read[kind, name]
        if existing is None and not ref.get("optional"):
            raise NotStartable(f'{kind} "{name}" not found')
        return existing or {}

    async def value(self, ref: Mapping[str, Any], *, secret: bool) -> str | None:
        """The value of `ref.key`; None if it is missing and optional."""
        values = await self.values(ref, secret=secret)
        key = str(ref.get("key", ""))
        if key in values:
            return values[key].decode("utf-8", "surrogateescape")
        if ref.get("optional"):
            return None
        kind = "Secret" if secret else "ConfigMap"
        raise NotStartable(f"couldn't find key {key} in {kind} {self._namespace}/{ref.get('name', '')}")

    async def _get(self, resource: Resource[Keyed], name: str, secret: bool) -> dict[str, bytes] | None:
        try:
            existing = await self._client.get(resource, self._namespace, name)
        except NotFound:
            return None
        encoded = {**(existing.data if secret else {}), **existing.binary_data}
        plain = existing.string_data if secret else existing.data
        try:
            decoded = {key: base64.b64decode(value, validate=True) for key, value in encoded.items()}
        except binascii.Error as e:
            raise NotStartable(f"{resource.plural} {self._namespace}/{name} has a value that is not base64") from e
        return {**decoded, **{key: value.encode() for key, value in plain.items()}}
