"""The volume claims of a worker: one for each of the job's templates, by the worker's index.

A worker that takes a lost one's place finds the volume of its index as that one left it. The operator makes what is
missing before it creates a pod, and the planner looks at no claim: one that is there already, of an earlier run, is
used as it is, as a StatefulSet does it. Claims belong to the job only if they are to be deleted with it.
"""

from __future__ import annotations

from typing import Any

from everstep.contract import labels
from everstep_operator import object_names
from everstep_operator.api.claims import ClaimTemplate, Retention
from everstep_operator.plan.snapshot import JobView


def of_worker(job: JobView, index: int) -> tuple[dict[str, Any], ...]:
    """What has to be there before a pod of this worker."""
    return tuple(_body(job, template, index) for template in job.spec.volume_claim_templates)


def put_in(job: JobView, index: int, spec: dict[str, Any]) -> None:
    """Give a pod's spec the volumes of its index."""
    templates = job.spec.volume_claim_templates
    if not templates:
        return
    names = {template.metadata.name for template in templates}
    others = [volume for volume in spec.get("volumes") or () if volume.get("name") not in names]
    claimed = [
        {"name": t.metadata.name, "persistentVolumeClaim": {"claimName": _name(job, t, index)}} for t in templates
    ]
    spec["volumes"] = [*others, *claimed]


def _name(job: JobView, template: ClaimTemplate, index: int) -> str:
    return f"{template.metadata.name}-{job.name}-w{index}"


def _body(job: JobView, template: ClaimTemplate, index: int) -> dict[str, Any]:
    metadata = object_names.metadata(_name(job, template, index), job.name, job.namespace, job.uid)
    metadata["labels"][labels.WORKER_INDEX] = str(index)
    if job.spec.persistent_volume_claim_retention_policy.when_deleted is Retention.RETAIN:
        del metadata["ownerReferences"], metadata["labels"][labels.JOB_UID]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": template.spec.to_wire(),
    }
