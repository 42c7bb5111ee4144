"""The part of spec.template that the CRD itself checks: its shape, its size and the container named worker.

The full PodTemplateSpec schema is too large for a CRD, so everything else is kept unchecked. The
ValidatingAdmissionPolicy refuses forbidden parts. Invariant: every list in a template has a bound, because the
operator's lists and the policy's evaluations cost more with each entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.contract.labels import GROUP, WORKER_CONTAINER
from everstep_operator.api.base import Check, FieldError
from everstep_operator.api.recovery import YEAR

MAX_CONTAINERS = 20
MAX_ENV = 1000
MAX_VOLUMES = 256
MAX_ARGS = 256
# Volumes that the operator adds: the worker's token, the Secret of etcd, and memory for /dev/shm.
TOKEN_VOLUME, ETCD_VOLUME, SHM_VOLUME = VOLUMES = ("everstep-token", "everstep-etcd", "everstep-shm")
# Linux takes at most 128 KiB in one argument or variable (MAX_ARG_STRLEN).
MAX_ARG_LENGTH = 32 * 1024

_OPEN: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_SECONDS: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": YEAR}
_NAME: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 63}


def _list_of(item: dict[str, Any], limit: int) -> dict[str, Any]:
    return {"type": "array", "maxItems": limit, "items": item}


_ARGUMENTS = _list_of({"type": "string", "maxLength": MAX_ARG_LENGTH}, MAX_ARGS)
_VARIABLE: dict[str, Any] = {
    **_OPEN,
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 256},
        "value": {"type": "string", "maxLength": MAX_ARG_LENGTH},
    },
}
# What the operator reads or adds to must have its shape here. Else a plan would fail on it only once something speaks
# against a node.
_AMOUNTS: dict[str, Any] = {**_OPEN, "maxProperties": 64}
_RESOURCES: dict[str, Any] = {
    **_OPEN,
    "properties": {"limits": _AMOUNTS, "requests": _AMOUNTS, "claims": _list_of(_OPEN, 64)},
}
_AFFINITY: dict[str, Any] = {
    **_OPEN,
    "properties": {
        "nodeAffinity": {
            **_OPEN,
            "properties": {"preferredDuringSchedulingIgnoredDuringExecution": _list_of(_OPEN, 256)},
        },
    },
}
_CONTAINER: dict[str, Any] = {
    **_OPEN,
    "required": ["name"],
    "properties": {
        "name": _NAME,
        "image": {"type": "string", "maxLength": 1024},
        "command": _ARGUMENTS,
        "args": _ARGUMENTS,
        "env": _list_of(_VARIABLE, MAX_ENV),
        "envFrom": _list_of(_OPEN, 64),
        "ports": _list_of(_OPEN, 100),
        "volumeMounts": _list_of(_OPEN, MAX_VOLUMES),
        "resources": _RESOURCES,
        "restartPolicy": {"type": "string", "maxLength": 63},
        "restartPolicyRules": _list_of(_OPEN, 20),
    },
}
_STRINGS: dict[str, Any] = {
    "type": "object",
    "maxProperties": 64,
    "additionalProperties": {"type": "string", "maxLength": MAX_ARG_LENGTH},
}

TEMPLATE_SCHEMA: dict[str, Any] = {
    **_OPEN,
    "required": ["spec"],
    "properties": {
        "metadata": {
            **_OPEN,
            "properties": {
                "labels": _STRINGS,
                "annotations": _STRINGS,
                "finalizers": _list_of({"type": "string", "maxLength": 316}, 32),
                "name": {"type": "string", "maxLength": 253},
                "generateName": {"type": "string", "maxLength": 253},
                "namespace": {"type": "string", "maxLength": 253},
                "ownerReferences": _list_of(_OPEN, 32),
            },
        },
        "spec": {
            **_OPEN,
            "required": ["containers"],
            "properties": {
                "containers": {**_list_of(_CONTAINER, MAX_CONTAINERS), "minItems": 1},
                "initContainers": _list_of(_CONTAINER, MAX_CONTAINERS),
                "volumes": _list_of(
                    {**_OPEN, "properties": {"name": {"type": "string", "maxLength": 253}}}, MAX_VOLUMES
                ),
                "hostname": {"type": "string", "maxLength": 253},
                "subdomain": {"type": "string", "maxLength": 253},
                "setHostnameAsFQDN": {"type": "boolean"},
                "restartPolicy": {"type": "string", "maxLength": 63},
                "terminationGracePeriodSeconds": _SECONDS,
                "activeDeadlineSeconds": _SECONDS,
                "nodeSelector": _STRINGS,
                "affinity": _AFFINITY,
                "tolerations": _list_of(_OPEN, 64),
                "imagePullSecrets": _list_of(_OPEN, 64),
                "hostAliases": _list_of(_OPEN, 64),
            },
        },
    },
}


def worker_container(template: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The trainer's container of a pod template; None if there is none, or more than one."""
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, Mapping) else None
    if not isinstance(containers, list):
        return None
    workers = [c for c in containers if isinstance(c, Mapping) and c.get("name") == WORKER_CONTAINER]
    return workers[0] if len(workers) == 1 else None


_TYPES: dict[str, Any] = {"object": Mapping, "array": list, "string": str, "integer": int, "boolean": bool}


def require_bounded(value: Any, schema: Mapping[str, Any] = TEMPLATE_SCHEMA, path: str = "") -> None:
    """Raise FieldError if `value` breaks `schema`. Only the keywords that TEMPLATE_SCHEMA uses are supported. A null is
    an absent field; required fields and items must not be null.
    """
    expected = schema["type"]
    # In Python a bool is an int.
    if not isinstance(value, _TYPES[expected]) or isinstance(value, bool) != (expected == "boolean"):
        raise FieldError(path, f"must be of type {expected}, not {type(value).__name__}")
    if expected == "boolean":
        return
    if expected == "integer":
        if not schema["minimum"] <= value <= schema["maximum"]:
            raise FieldError(path, f"must be {schema['minimum']} to {schema['maximum']}")
        return
    for key, too_many in (("maxItems", "items"), ("maxLength", "characters"), ("maxProperties", "entries")):
        if key in schema and len(value) > schema[key]:
            raise FieldError(path, f"has {len(value)} {too_many}, at most {schema[key]} are allowed")
    if len(value) < max(schema.get("minItems", 0), schema.get("minLength", 0)):
        raise FieldError(path, "must not be empty")
    if expected == "array":
        for index, item in enumerate(value):
            require_bounded(item, schema["items"], f"{path}[{index}]")
    elif expected == "object":
        _require_bounded_fields(value, schema, path)


def _require_bounded_fields(value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> None:
    for name in schema.get("required", ()):
        if value.get(name) is None:
            raise FieldError(f"{path}.{name}", "is required")
    for name, child in value.items():
        inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
        if inner is not None and child is not None:
            require_bounded(child, inner, f"{path}.{name}")


# Fields of a template that the operator sets itself. A user's value is refused by name, because it could not be kept.
# (Variables of a worker's identity are replaced: docs/reference/everstep-operator.md names them.)


def _pod_field(template: Mapping[str, Any], name: str) -> Any:
    return (template.get("spec") or {}).get(name)


def _ours(name: str, why: str, *allowed: str) -> Check:
    values = ", ".join(f"'{value}'" for value in ("", *allowed))
    expected = " or ".join([*allowed, "absent"])
    return Check(
        cel=f"!has(self.template.spec.{name}) || self.template.spec.{name} in [{values}]",
        message=f"spec.template.spec.{name} must be {expected}: {why}",
        field=f".template.spec.{name}",
        holds=lambda s: _pod_field(s.template, name) in (None, "", *allowed),
    )


def _restarts_itself(template: Mapping[str, Any]) -> bool:
    worker = worker_container(template) or {}
    return worker.get("restartPolicy") not in (None, "", "Never") or bool(worker.get("restartPolicyRules"))


_RESERVED = frozenset({"namespace"})  # of CEL, as far as a template's metadata has such a field


def _labels(template: Mapping[str, Any]) -> Mapping[str, Any]:
    return (template.get("metadata") or {}).get("labels") or {}


def _set_by_us(name: str, why: str) -> Check:
    """A field of the template's metadata. A word that CEL reserves is written with underscores: newer API servers take
    it as it is, and 1.30 does not."""
    field = f"__{name}__" if name in _RESERVED else name
    return Check(
        cel=f"!has(self.template.metadata) || !has(self.template.metadata.{field}) || "
        f"self.template.metadata.{field}.size() == 0",
        message=f"spec.template.metadata.{name} must be absent: {why}",
        field=f".template.metadata.{name}",
        holds=lambda s: not (s.template.get("metadata") or {}).get(name),
    )


TEMPLATE_CHECKS: tuple[Check, ...] = (
    _set_by_us("name", "each worker's pod is named by the job, the worker's index and its incarnation"),
    _set_by_us("generateName", "each worker's pod is named by the job, the worker's index and its incarnation"),
    _set_by_us("namespace", "workers run in the namespace of their job"),
    _set_by_us("ownerReferences", "the job owns its workers, and they go with it"),
    _ours("hostname", "each worker has its pod's name, by which the others find it"),
    _ours("subdomain", "workers are in the subdomain of the job's own Service"),
    Check(
        cel="!has(self.template.spec.setHostnameAsFQDN) || !self.template.spec.setHostnameAsFQDN",
        message="spec.template.spec.setHostnameAsFQDN must be false or absent: a worker's name with the job's Service "
        "and the namespace may be longer than the 64 characters of a host name, and then the kubelet never starts the "
        "pod; a script that needs the full name calls socket.getfqdn()",
        field=".template.spec.setHostnameAsFQDN",
        holds=lambda s: not _pod_field(s.template, "setHostnameAsFQDN"),
    ),
    _ours("restartPolicy", "the operator restarts workers", "Never"),
    Check(
        cel="self.template.spec.containers.all(c, "
        f"c.name != '{WORKER_CONTAINER}' || ((!has(c.restartPolicy) || c.restartPolicy in ['', 'Never']) && "
        "(!has(c.restartPolicyRules) || c.restartPolicyRules.size() == 0)))",
        message=f"spec.template.spec.containers: the container '{WORKER_CONTAINER}' must not have restartPolicyRules, "
        "nor a restartPolicy other than Never: the operator restarts workers, and its end is the worker's",
        field=".template.spec.containers",
        holds=lambda s: not _restarts_itself(s.template),
    ),
    Check(
        cel="!has(self.template.metadata) || !has(self.template.metadata.labels) || "
        f"self.template.metadata.labels.all(k, !k.startsWith('{GROUP}/'))",
        message=f"spec.template.metadata.labels must not have labels that begin with {GROUP}/: they say which worker a "
        "pod is, and the operator sets them",
        field=".template.metadata.labels",
        holds=lambda s: not any(str(key).startswith(f"{GROUP}/") for key in _labels(s.template)),
    ),
    Check(
        cel="!has(self.template.spec.volumes) || self.template.spec.volumes.all(v, "
        f"!has(v.name) || !(v.name in {list(VOLUMES)}))",
        message=f"spec.template.spec.volumes must not have the names {', '.join(VOLUMES)}: the operator "
        "adds volumes of these names",
        field=".template.spec.volumes",
        holds=lambda s: (
            not any(
                isinstance(v, Mapping) and v.get("name") in VOLUMES for v in _pod_field(s.template, "volumes") or ()
            )
        ),
    ),
)
