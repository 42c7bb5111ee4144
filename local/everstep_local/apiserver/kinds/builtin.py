"""The kinds that every cluster has, as far as an operator, a kubelet and a command line use them."""

from __future__ import annotations

import base64
from typing import Any

from everstep_local.apiserver.kinds import pods
from everstep_local.apiserver.kinds.kind import Kind
from everstep_local.apiserver.kinds.metadata import dns_1035, dns_label, dns_subdomain
from everstep_local.apiserver.refusals import FieldError, forbidden, invalid, not_supported, required
from everstep_local.apiserver.storage.merging import at_path
from everstep_local.apiserver.storage.store import Json

EVENT_NOTE = 1024  # bytes
EVENT_NAME = 128
_EVENT_FIXED = (
    "note",
    "reason",
    "type",
    "action",
    "reportingController",
    "reportingInstance",
    "eventTime",
    "regarding",
)


def _spec(raw: Json) -> Any:
    return raw.get("spec")


def _prepare_service(new: Json, old: Json | None) -> Json:
    spec = {"type": "ClusterIP", "sessionAffinity": "None", **(new.get("spec") or {})}
    if spec.get("ports"):
        spec["ports"] = [{"protocol": "TCP", "targetPort": port.get("port"), **port} for port in spec["ports"]]
    if old is not None:
        addresses = {key: old["spec"][key] for key in ("clusterIP", "clusterIPs") if key in old["spec"]}
        return {**new, "spec": {**addresses, **spec}}
    if "clusterIP" not in spec and spec["type"] != "ExternalName":
        # The address follows from the UID. This needs no allocator, and two services of one cluster hardly ever share
        # an address.
        number = int(new["metadata"]["uid"][:4], 16)
        spec["clusterIP"] = f"10.96.{number >> 8}.{number & 255}"
    if "clusterIP" in spec:
        spec["clusterIPs"] = [spec["clusterIP"]]
    return {**new, "spec": spec, "status": {"loadBalancer": {}}}


def _validate_service(new: Json, old: Json | None) -> list[FieldError]:
    spec, errors = new["spec"], []
    if not spec.get("ports") and spec.get("clusterIP") != "None" and spec["type"] != "ExternalName":
        errors.append(required("spec.ports"))
    for index, port in enumerate(spec.get("ports") or ()):
        number = port.get("port")
        if not isinstance(number, int) or not 1 <= number <= 65535:
            errors.append(invalid(f"spec.ports[{index}].port", number, "must be between 1 and 65535, inclusive"))
        if len(spec["ports"]) > 1 and not port.get("name"):
            errors.append(required(f"spec.ports[{index}].name"))
    if old is not None and old["spec"].get("clusterIP") != spec.get("clusterIP"):
        errors.append(invalid("spec.clusterIPs[0]", [spec.get("clusterIP")], "may not change once set"))
    return errors


def _validate_lease(new: Json, _: Json | None) -> list[FieldError]:
    spec, errors = new.get("spec") or {}, []
    seconds, transitions = spec.get("leaseDurationSeconds"), spec.get("leaseTransitions")
    if seconds is not None and seconds <= 0:
        errors.append(invalid("spec.leaseDurationSeconds", seconds, "must be greater than 0"))
    if transitions is not None and transitions < 0:
        errors.append(invalid("spec.leaseTransitions", transitions, "must be greater than or equal to 0"))
    return errors


def _validate_event(new: Json, old: Json | None) -> list[FieldError]:
    if old is not None:
        errors = [
            invalid(field, new.get(field), "field is immutable")
            for field in _EVENT_FIXED
            if new.get(field) != old.get(field)
        ]
        return errors + _series(new)
    errors = [
        required(field) for field in ("eventTime", "reportingController", "reportingInstance") if not new.get(field)
    ]
    errors += [required(field) for field in ("action", "reason") if not new.get(field)]
    for field in ("action", "reason", "reportingInstance"):
        if len(str(new.get(field) or "")) > EVENT_NAME:
            errors.append(invalid(field, "", f"can have at most {EVENT_NAME} characters"))
    if len((new.get("note") or "").encode()) > EVENT_NOTE:
        errors.append(invalid("message", "", f"can have at most {EVENT_NOTE} characters"))
    if new.get("type") not in ("Normal", "Warning"):
        errors.append(invalid("type", new.get("type") or "", "has invalid value"))
    if not at_path(new, ("regarding", "namespace")) and new["metadata"]["namespace"] != "default":
        errors.append(invalid("involvedObject.namespace", "", "does not match event.namespace"))
    return errors + _series(new)


def _series(event: Json) -> list[FieldError]:
    series, errors = event.get("series"), []
    if series is None:
        return []
    if (series.get("count") or 0) < 2:
        errors.append(invalid("series.count", series.get("count") or 0, "should be at least 2"))
    if not series.get("lastObservedTime"):
        errors.append(required("series.lastObservedTime"))
    return errors


def _prepare_namespace(new: Json, old: Json | None) -> Json:
    if old is not None:
        return new
    meta = new["metadata"]
    labels = {**(meta.get("labels") or {}), "kubernetes.io/metadata.name": meta["name"]}
    return {
        **new,
        "metadata": {**meta, "labels": labels},
        "spec": {"finalizers": ["kubernetes"]},
        "status": {"phase": "Active"},
    }


def _validate_config_map(new: Json, old: Json | None) -> list[FieldError]:
    errors = [
        invalid(f"data[{key}]", value, "must be a string")
        for key, value in (new.get("data") or {}).items()
        if not isinstance(value, str)
    ]
    if old is not None and old.get("immutable") and (new.get("data") != old.get("data") or not new.get("immutable")):
        errors.append(forbidden("data", "field is immutable when `immutable` is set"))
    return errors


def _prepare_secret(new: Json, _: Json | None) -> Json:
    """Store values that were written as text in base64, as all others."""
    secret = {"type": "Opaque", **new}
    texts = secret.pop("stringData", None)
    if texts:
        data = {key: base64.b64encode(str(text).encode()).decode() for key, text in texts.items()}
        secret["data"] = {**(secret.get("data") or {}), **data}
    return secret


def _validate_secret(new: Json, old: Json | None) -> list[FieldError]:
    if old is not None and old.get("type") != new.get("type"):
        return [invalid("type", new.get("type"), "field is immutable")]
    return []


def _validate_pdb(new: Json, _: Json | None) -> list[FieldError]:
    spec = new.get("spec") or {}
    if "minAvailable" in spec and "maxUnavailable" in spec:
        return [invalid("spec", spec, "minAvailable and maxUnavailable cannot be both set")]
    return []


def _validate_node(new: Json, _: Json | None) -> list[FieldError]:
    effects = ("NoSchedule", "PreferNoSchedule", "NoExecute")
    errors = []
    for index, taint in enumerate(at_path(new, ("spec", "taints")) or ()):
        if not taint.get("key"):
            errors.append(required(f"spec.taints[{index}].key"))
        if taint.get("effect") not in effects:
            errors.append(not_supported(f"spec.taints[{index}].effect", taint.get("effect"), effects))
    return errors


BUILTIN: tuple[Kind, ...] = (
    Kind(
        "", "v1", "namespaces", "Namespace",
        namespaced=False, has_status=True, prepare=_prepare_namespace, name_errors=dns_label,
    ),
    Kind(
        "", "v1", "pods", "Pod",
        has_status=True, counts=_spec, graceful=True, prepare=pods.prepare, validate=pods.validate,
        name_errors=dns_subdomain,
    ),
    Kind(
        "", "v1", "services", "Service",
        has_status=True, prepare=_prepare_service, validate=_validate_service, name_errors=dns_1035,
    ),
    Kind(
        "", "v1", "nodes", "Node",
        namespaced=False, has_status=True, status_on_create=True, validate=_validate_node, name_errors=dns_subdomain,
    ),
    Kind("", "v1", "configmaps", "ConfigMap", validate=_validate_config_map, name_errors=dns_subdomain),
    Kind("", "v1", "secrets", "Secret", prepare=_prepare_secret, validate=_validate_secret, name_errors=dns_subdomain),
    Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", has_status=True, name_errors=dns_subdomain),
    Kind("", "v1", "serviceaccounts", "ServiceAccount", name_errors=dns_subdomain),
    Kind("", "v1", "bindings", "Binding"),
    Kind(
        "coordination.k8s.io", "v1", "leases", "Lease",
        unconditional_update=False, create_on_update=True, validate=_validate_lease, name_errors=dns_subdomain,
    ),
    Kind(
        "events.k8s.io", "v1", "events", "Event",
        create_on_update=True, validate=_validate_event, name_errors=dns_subdomain,
    ),
    Kind(
        "policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget",
        has_status=True, counts=_spec, unconditional_update=False, validate=_validate_pdb, name_errors=dns_subdomain,
    ),
)  # fmt: skip
