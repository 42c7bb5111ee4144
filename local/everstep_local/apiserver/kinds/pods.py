"""The server's rules for pods: defaults, required fields, and the few fields that may change later.

Only rules that concern an operator, a scheduler or a kubelet are checked. Fields that are not known here are kept as
they are. Invariant: the spec of a stored pod never changes, except its images, deadlines and added tolerations.
"""

from __future__ import annotations

from typing import Any

from everstep_local.apiserver.kinds.metadata import dns_label
from everstep_local.apiserver.refusals import FieldError, duplicate, forbidden, invalid, not_supported, required
from everstep_local.apiserver.storage.merging import at_path
from everstep_local.apiserver.storage.store import Json

RESTART_POLICIES = ("Always", "OnFailure", "Never")
_DEFAULTS: Json = {
    "restartPolicy": "Always",
    "terminationGracePeriodSeconds": 30,
    "dnsPolicy": "ClusterFirst",
    "securityContext": {},
    "schedulerName": "default-scheduler",
    "enableServiceLinks": True,
    "preemptionPolicy": "PreemptLowerPriority",
    "priority": 0,
}
# Defaults are set at creation only: a later PUT that leaves a field out is a change.
_ADMITTED: Json = {"serviceAccountName": "default"}
_CONTAINER: Json = {
    "resources": {},
    "terminationMessagePath": "/dev/termination-log",
    "terminationMessagePolicy": "File",
}
# A real server's admission adds these: how long a pod stays on a node that is not ready or cannot be reached.
_TOLERATED = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
TOLERATION_SECONDS = 300
_MUTABLE = ("activeDeadlineSeconds", "tolerations", "containers", "initContainers")


def prepare(new: Json, old: Json | None) -> Json:
    """The pod with defaults. A new pod is Pending."""
    if old is not None and new.get("spec") is old.get("spec"):
        return new
    spec = {**_DEFAULTS, **(_ADMITTED if old is None else {}), **(new.get("spec") or {})}
    if "serviceAccountName" in spec:
        spec["serviceAccount"] = spec["serviceAccountName"]
    for field in ("containers", "initContainers"):
        if spec.get(field):
            spec[field] = [{**_pull_policy(container), **_CONTAINER, **container} for container in spec[field]]
    spec["tolerations"] = _tolerations(spec.get("tolerations") or [])
    if old is None:
        return {**new, "spec": spec, "status": {"phase": "Pending", "qosClass": _quality(spec)}}
    return {**new, "spec": spec}


def _pull_policy(container: Json) -> Json:
    image = container.get("image", "")
    latest = isinstance(image, str) and (image.endswith(":latest") or ":" not in image.rpartition("/")[2])
    return {"imagePullPolicy": "Always" if latest else "IfNotPresent"}


def _tolerations(sent: list[Json]) -> list[Json]:
    added = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": TOLERATION_SECONDS}
        for key in _TOLERATED
        if not any(_tolerates(toleration, key) for toleration in sent)
    ]
    return [*sent, *added]


def _tolerates(toleration: Json, key: str) -> bool:
    return toleration.get("key") in (None, "", key) and toleration.get("effect") in (None, "", "NoExecute")


def _quality(spec: Json) -> str:
    parts = [container.get("resources") or {} for container in spec.get("containers") or ()]
    if not any(part.get("requests") or part.get("limits") for part in parts):
        return "BestEffort"
    whole = all(
        {"cpu", "memory"} <= (part.get("limits") or {}).keys()
        and (part.get("requests") or part.get("limits")) == part.get("limits")
        for part in parts
    )
    return "Guaranteed" if whole else "Burstable"


def validate(new: Json, old: Json | None) -> list[FieldError]:
    if old is not None:
        return [] if new.get("spec") is old.get("spec") else _changed(new["spec"], old["spec"])
    spec = new["spec"]
    errors = _containers(spec)
    if spec["restartPolicy"] not in RESTART_POLICIES:
        errors.append(not_supported("spec.restartPolicy", spec["restartPolicy"], RESTART_POLICIES))
    for field in ("hostname", "subdomain"):
        if spec.get(field):
            errors += [invalid(f"spec.{field}", spec[field], text) for text in dns_label(spec[field])]
    for field in ("terminationGracePeriodSeconds", "activeDeadlineSeconds"):
        least = 1 if field == "activeDeadlineSeconds" else 0
        value = spec.get(field)
        if value is not None and (not isinstance(value, int) or value < least):
            errors.append(invalid(f"spec.{field}", value, f"must be at least {least}"))
    return errors


def _containers(spec: Json) -> list[FieldError]:
    containers = spec.get("containers")
    if not containers:
        return [required("spec.containers")]
    volumes = {container.get("name") for container in spec.get("volumes") or ()}
    errors = []
    names: set[Any] = set()
    lists = [("initContainers", spec.get("initContainers") or []), ("containers", containers)]
    for path, container in ((f"spec.{field}[{i}]", c) for field, many in lists for i, c in enumerate(many)):
        name = container.get("name")
        if not name:
            errors.append(required(f"{path}.name"))
        else:
            errors += [invalid(f"{path}.name", name, text) for text in dns_label(name)]
            if name in names:
                errors.append(duplicate(f"{path}.name", name))
            names.add(name)
        if not container.get("image"):
            errors.append(required(f"{path}.image"))
        errors += _inside(path, container, volumes)
    return errors


def _inside(path: str, container: Json, volumes: set[Any]) -> list[FieldError]:
    errors = []
    for index, variable in enumerate(container.get("env") or ()):
        if not variable.get("name"):
            errors.append(required(f"{path}.env[{index}].name"))
    for index, mount in enumerate(container.get("volumeMounts") or ()):
        if mount.get("name") not in volumes:
            errors.append(
                FieldError("NotFound", f"{path}.volumeMounts[{index}].name", f'Not found: "{mount.get("name")}"')
            )
        if not mount.get("mountPath"):
            errors.append(required(f"{path}.volumeMounts[{index}].mountPath"))
    return errors


def _changed(new: Json, old: Json) -> list[FieldError]:
    errors = []
    before, after = old.get("activeDeadlineSeconds"), new.get("activeDeadlineSeconds")
    if before is not None and after is None:
        text = "must not update from a positive integer to nil value"
        errors.append(invalid("spec.activeDeadlineSeconds", None, text))
    elif before is not None and after > before:
        errors.append(invalid("spec.activeDeadlineSeconds", after, "must be less than or equal to previous value"))
    tolerations = new.get("tolerations") or []
    if any(toleration not in tolerations for toleration in old.get("tolerations") or ()):
        text = "existing toleration can not be modified except its tolerationSeconds"
        errors.append(forbidden("spec.tolerations", text))
    if _fixed(new) != _fixed(old):
        errors.append(
            forbidden(
                "spec",
                "pod updates may not change fields other than `spec.containers[*].image`,"
                "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to "
                "existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was "
                "previously negative)",
            )
        )
    return errors


def _fixed(spec: Json) -> Json:
    """The part of a pod that may not change."""
    fixed = {key: value for key, value in spec.items() if key not in _MUTABLE}
    for field in ("containers", "initContainers"):
        fixed[field] = [{k: v for k, v in container.items() if k != "image"} for container in spec.get(field) or ()]
    return fixed


def phase(pod: Json) -> str:
    """Pending, Running, Succeeded, Failed or Unknown."""
    return str(at_path(pod, ("status", "phase")) or "Pending")
