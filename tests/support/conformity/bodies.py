"""Objects that the cases create, and the resources that they use."""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from everstep.contract import labels
from everstep_operator.kube.resources import Resource, custom_resource
from everstep_operator.kube.wire import KubeObject, Unstructured


class WithData(KubeObject, frozen=True, kw_only=True):
    """A ConfigMap or a Secret."""

    data: dict[str, str] = msgspec.field(default_factory=dict)


JOBS = custom_resource(labels.GROUP, labels.VERSION, labels.PLURAL, labels.KIND, Unstructured)
NAMESPACES: Resource[Unstructured] = Resource("", "v1", "namespaces", "Namespace", Unstructured, namespaced=False)
ACCOUNTS = custom_resource("", "v1", "serviceaccounts", "ServiceAccount", Unstructured)
CONFIGMAPS = custom_resource("", "v1", "configmaps", "ConfigMap", WithData)
SECRETS = custom_resource("", "v1", "secrets", "Secret", WithData)
BINDINGS = custom_resource("", "v1", "bindings", "Binding", KubeObject)
CONTAINER = {"name": "worker", "image": "train:1", "command": ["torchrun", "train.py"]}
ABSENT = "<absent>"
NO_UID = "00000000-0000-0000-0000-000000000000"


def pod(name: str, **labels_: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": labels_},
        "spec": {"containers": [{"name": "worker", "image": "none:1"}]},
    }


def configmap(name: str, data: dict[str, str] | None = None, **labels_: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels_}, "data": data or {}}


def job(name: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A good TrainingJob with changes: each a path of the spec and its value, or "<absent>"."""
    spec: dict[str, Any] = {"replicas": 2, "template": {"spec": {"containers": [copy.deepcopy(CONTAINER)]}}}
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        node = spec
        for parent in parents:
            node = node.setdefault(parent, {})
        if value == ABSENT:
            node.pop(last)
        else:
            node[last] = value
    return {"metadata": {"name": name}, "spec": spec}


def owner(kind: str, of: KubeObject, *, api_version: str = "v1") -> dict[str, Any]:
    """A reference to `of`."""
    meta = of.metadata
    return {"apiVersion": api_version, "kind": kind, "name": meta.name, "uid": meta.uid, "blockOwnerDeletion": False}
