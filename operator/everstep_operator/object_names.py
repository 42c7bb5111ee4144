"""Names and metadata of a job's objects. The names are deterministic: after a crash the same decision gives the same
name. So a pod is never created twice, and its name is enough to find it."""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import datetime
from typing import Any

from everstep.contract import labels

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def is_namespace(text: str) -> bool:
    """Whether a namespace can have this name."""
    return _NAMESPACE.fullmatch(text) is not None


def pod_name(job: str, index: int, incarnation: int) -> str:
    return f"{job}-w{index}-{incarnation}"


def service_name(job: str) -> str:
    """The headless service that gives worker pods their host names; the disruption budget has the same name."""
    return f"{job}-workers"


def incarnation_of_round(round_: int) -> int:
    """Every round of the c10d backend recreates every worker (ADR 0027), so round r is made of incarnation r - 1."""
    return round_ - 1


def round_of_incarnation(incarnation: int) -> int:
    return incarnation + 1


def selector(job: str) -> str:
    return f"{labels.JOB}={job}"


def name_collision(
    kind: str, name: str, namespace: str, job: str, owner: tuple[str, str] | None, ends: datetime | None = None
) -> str:
    """Says that an object has a name that the job needs, whose it is, and what to do. `owner`: kind and name of its
    controller. `ends`: when it should be gone, if it is being deleted."""
    if owner is None:
        whose = "no job owns it (an earlier job was deleted without it, or somebody made it)"
    elif owner == (labels.KIND, job):
        whose = f"an earlier job {job} owns it, with which it should go; if it stays"
    else:
        whose = f"{owner[0]} {owner[1]} owns it"
    delete = f"kubectl delete {kind.lower()} {name} -n {namespace}"
    if ends is not None:
        # Deleting it once more would change nothing: a finalizer keeps it, or its kubelet is gone.
        by_force = f" and its node; once the node is gone, delete it by force ({delete} --force)"
        return (
            f"{kind} {name} has a name that this job needs, and is being deleted: it should be gone by "
            f"{ends:%Y-%m-%d %H:%M:%S} UTC; if it stays, look at its finalizers{by_force if kind == 'Pod' else ''}"
        )
    return f"{kind} {name} has a name that this job needs, and {whose}, delete it ({delete}), or rename this job"


def list_of_workers(indices: Collection[int]) -> str:
    """Workers by index, for people: `workers 0, 2, 3`."""
    shown = sorted(indices)
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f"worker{'s' if len(shown) > 1 else ''} {', '.join(map(str, shown[:8]))}{more}"


def number_of_workers(count: int) -> str:
    """`1 worker`, `3 workers`."""
    return f"{count} worker{'' if count == 1 else 's'}"


def number_of_pods(count: int) -> str:
    """`1 pod`, `3 pods`."""
    return f"{count} pod{'' if count == 1 else 's'}"


def resizing(before: int, wanted: int) -> str:
    """`resizing from 3 to 4 workers`."""
    return f"resizing from {before} to {number_of_workers(wanted)}"


def number_of_spares(count: int) -> str:
    """`1 spare`, `3 spares`."""
    return f"{count} spare{'' if count == 1 else 's'}"


def rendezvous_host(job: str, namespace: str, round_: int) -> str:
    """The host name of worker 0 in exactly this round. No other round or job ever has this name."""
    return f"{pod_name(job, 0, incarnation_of_round(round_))}.{service_name(job)}.{namespace}.svc"


def metadata(name: str, job: str, namespace: str, uid: str) -> dict[str, Any]:
    """The metadata of an object with this name, which the job owns."""
    owner = {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "name": job,
        "uid": uid,
        "controller": True,
        # True would need a permission on finalizers that we do not need otherwise.
        "blockOwnerDeletion": False,
    }
    ours = {labels.JOB: job, labels.JOB_UID: uid, labels.MANAGED_BY: labels.MANAGER}
    return {"name": name, "namespace": namespace, "labels": ours, "ownerReferences": [owner]}
