"""Hashes those parts of a spec that all pods of one world must have in common.

The hash stands on each worker's pod as a label. A worker with another hash was made from an older spec, and is replaced
(`decide.update`, ADR 0035). A pod without the label, which an older operator made, counts as current.

Only what a user wrote enters: fields that may not change while the job runs (`api.immutable`), without those that have
the default of the version in which they began to enter (`DEFAULTS`). So neither a newer operator, nor its settings, nor
what the API server and webhooks add to pods changes the hash. Fields that may change while the job runs (`replicas`,
`elastic`, intervals of commits, limits of recovery) stay out: they apply to pods that are made later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from everstep_operator.api.types import RendezvousBackend, TrainingJobSpec
from everstep_operator.plan.snapshot import Snapshot, WorkerPod
from everstep_operator.plan.state import sizing

LENGTH = 16  # of the hexadecimal digits of a SHA-256


# The defaults of `spec.rendezvous` when each field began to enter the hash. They are left out, as they were then: a
# later default must not change the hash of a spec that is stored with an earlier one. Never change a value.
DEFAULTS: Mapping[str, Any] = {
    "backend": "everstep",
    "joinTimeoutSeconds": 600,
    "etcd": {"endpoints": [], "prefix": "/everstep", "secretRef": None},
}


def of_spec(spec: TrainingJobSpec) -> str:
    """The hash that each pod made from this spec gets."""
    elastic = spec.elastic
    made_from: dict[str, Any] = {
        "metadata": {key: value for key, value in _without_nulls(spec.template.get("metadata") or {}).items() if value},
        "template": _without_nulls({key: value for key, value in spec.template.items() if key != "metadata"}),
        "rendezvous": _without(DEFAULTS, spec.rendezvous.model_dump(mode="json", by_alias=True)),
    }
    if spec.processes_per_replica != 1:
        made_from["processesPerReplica"] = spec.processes_per_replica
    if spec.checkpoint is not None:
        made_from["checkpoint.url"] = spec.checkpoint.url
        if spec.checkpoint.on_preemption:
            made_from["checkpoint.onPreemption"] = True
    if spec.pod_group is not None:
        made_from["scheduling.podGroup"] = spec.pod_group.model_dump(mode="json", by_alias=True, exclude_none=True)
    if spec.network is not None:
        made_from["network"] = spec.network.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if spec.volume_claim_templates:
        made_from["volumeClaimTemplates"] = [claim.metadata.name for claim in spec.volume_claim_templates]
    if elastic is not None and elastic.group_size != 1:
        made_from["elastic.groupSize"] = elastic.group_size
    if spec.rendezvous.backend is RendezvousBackend.ETCD:
        # Agents over etcd keep the sizes that they were started with, and refuse an agent that asks for others.
        sizes = sizing.bounds(spec)
        made_from["sizes"] = [sizes.minimum, sizes.maximum, *sizes.allowed]
    text = json.dumps(made_from, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def outdated(snapshot: Snapshot, pods: Iterable[WorkerPod]) -> tuple[WorkerPod, ...]:
    """Those of the pods that were made from another spec than the present one."""
    marked = [pod for pod in pods if pod.spec_hash is not None]
    if not marked:
        return ()
    present = of_spec(snapshot.job.spec)
    return tuple(pod for pod in marked if pod.spec_hash != present)


def _without(defaults: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are set and differ from these."""
    different = {}
    for key, child in value.items():
        default = defaults.get(key)
        if isinstance(child, Mapping) and isinstance(default, Mapping):
            different[key] = _without(default, child)
        elif child is not None and child != default:
            different[key] = child
    return different


def _without_nulls(value: Any) -> Any:
    """A null in a template is an absent field."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
