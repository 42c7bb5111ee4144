"""The part of a job's template that counts for quota: requests, and what a flavor of nodes has to fit.

A Workload says by a hash of it from which template it was made. Its pods are charged by that template, so pods of
another one must not run on its quota.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from everstep_operator.api.types import TrainingJobSpec
from everstep_operator.plan.snapshot import PodChanges

KUEUE = "kueue.x-k8s.io/"  # how its labels and annotations begin
_OF_CONTAINER = ("name", "image", "resources", "restartPolicy")
_OF_POD = ("nodeSelector", "overhead", "priorityClassName", "resources", "runtimeClassName", "tolerations")
LENGTH = 16  # of the hexadecimal digits of a SHA-256


def template(spec: TrainingJobSpec) -> dict[str, Any]:
    """The pod template of a Workload. The pods' variables, volumes and commands do not matter to a queue."""
    pod = spec.template.get("spec") or {}
    made: dict[str, Any] = {"containers": _containers(pod.get("containers")), "restartPolicy": "Never"}
    if initial := _containers(pod.get("initContainers")):
        made["initContainers"] = initial
    made.update({key: pod[key] for key in _OF_POD if pod.get(key)})
    if of_node := (pod.get("affinity") or {}).get("nodeAffinity"):
        made["affinity"] = {"nodeAffinity": of_node}
    return {"spec": made}


def made_from(spec: TrainingJobSpec) -> str:
    text = json.dumps(template(spec), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def refusal(spec: TrainingJobSpec) -> str | None:
    """Why a job of this template cannot be queued."""
    metadata = spec.template.get("metadata") or {}
    for kind in ("labels", "annotations"):
        if name := next((name for name in sorted(metadata.get(kind) or {}) if name.startswith(KUEUE)), None):
            return (
                f"spec.template.metadata.{kind} has {name}: a job with a queue of its own is charged once, and without "
                "topologies; take it out of the template"
            )
    if (spec.template.get("spec") or {}).get("resourceClaims"):
        return "spec.template.spec.resourceClaims: devices that are claimed are not charged; take the queue's label off"
    return None


def conflict(spec: TrainingJobSpec, changes: PodChanges) -> str | None:
    """Why pods of this template cannot run where they were admitted."""
    selector = (spec.template.get("spec") or {}).get("nodeSelector") or {}
    for key, value in sorted(changes.node_selector.items()):
        if selector.get(key, value) != value:
            return (
                f"spec.template.spec.nodeSelector asks for {key}={selector[key]}, and the queue gives nodes with "
                f"{key}={value}; take {key} out of the template"
            )
    return None


def _containers(containers: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    return [{key: each[key] for key in _OF_CONTAINER if each.get(key)} for each in containers or ()]
