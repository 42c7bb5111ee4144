"""Deletion: preconditions, grace, finalizers.

Invariant: an object leaves the store only when it has no finalizer and no grace left. Until then it has a
deletionTimestamp, which is never removed and never postponed.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from everstep_local.apiserver.kinds.kind import Kind
from everstep_local.apiserver.refusals import conflict
from everstep_local.apiserver.server import NAMESPACE_TABLE, Server
from everstep_local.apiserver.storage.merging import at_path
from everstep_local.apiserver.storage.store import Json, Stored
from everstep_operator.kube.client import Propagation
from everstep_operator.kube.wire import rfc3339

ORPHAN = "orphan"  # the finalizer of an owner whose dependents must stay
DEFAULT_GRACE = 30  # seconds


def delete(
    server: Server,
    kind: Kind,
    namespace: str | None,
    name: str,
    *,
    uid: str | None = None,
    resource_version: str | None = None,
    grace_seconds: int | None = None,
    propagation: Propagation | None = None,
) -> None:
    """Begin or complete the deletion. Raises Refusal: 404, or 409 if a precondition does not hold."""
    old = server.find(kind, namespace, name)
    # Here the server names the kind; elsewhere it names the resource.
    if uid is not None and uid != old.uid:
        detail = "The object might have been deleted and then recreated"
        raise conflict(kind.full_kind, name, _mismatch("UID", uid, old.uid, detail))
    version = old.meta["resourceVersion"]
    if resource_version is not None and resource_version != version:
        detail = "The object might have been modified"
        raise conflict(kind.full_kind, name, _mismatch("ResourceVersion", resource_version, version, detail))
    if kind.id == NAMESPACE_TABLE:
        _terminate_namespace(server, kind, old)
        return
    grace = _grace(kind, old, grace_seconds)
    finalizers = _finalizers(old, propagation)
    if not finalizers and not kind.graceful:
        server.remove(kind, old)
        return
    # A pod is marked before it is removed, even if that is at once: watchers see both changes.
    meta = _marked(server, old, grace, finalizers)
    marked = old
    if meta != old.meta:
        marked = server.store.put(kind.id, {**old.raw, "metadata": meta}, old)
        server.touched(marked.uid)
    if not grace and not finalizers:
        server.remove(kind, marked)


def _mismatch(what: str, expected: str, actual: str, detail: str) -> str:
    return f"the {what} in the precondition ({expected}) does not match the {what} in record ({actual}). {detail}"


def _grace(kind: Kind, old: Stored, requested: int | None) -> int:
    """The grace of an object in seconds. A pod that no kubelet runs, or that has ended, gets none."""
    if not kind.graceful:
        return 0
    if requested is not None and requested < 0:
        requested = 1
    if pending := old.meta.get("deletionGracePeriodSeconds"):
        # The deletion has begun: its grace can only become shorter, and later changes of the pod do not matter.
        return int(pending) if requested is None else min(requested, int(pending))
    if not at_path(old.raw, ("spec", "nodeName")) or at_path(old.raw, ("status", "phase")) in ("Succeeded", "Failed"):
        return 0
    if requested is not None:
        return requested
    configured = at_path(old.raw, ("spec", "terminationGracePeriodSeconds"))
    return DEFAULT_GRACE if configured is None else int(configured)


def _finalizers(old: Stored, propagation: Propagation | None) -> list[str]:
    finalizers = list(old.meta.get("finalizers") or ())
    if propagation is None:
        return finalizers
    finalizers = [name for name in finalizers if name != ORPHAN]
    return [*finalizers, ORPHAN] if propagation == "Orphan" else finalizers


def _marked(server: Server, old: Stored, grace: int, finalizers: list[str]) -> Json:
    """The metadata of an object that is being deleted."""
    meta = {key: value for key, value in old.meta.items() if key != "finalizers"}
    if finalizers:
        meta["finalizers"] = finalizers
    if "deletionTimestamp" in meta and grace >= meta["deletionGracePeriodSeconds"]:
        return meta
    began = server.clock.now()
    if "deletionTimestamp" in meta:
        # A shorter grace counts from the first delete, not from this one.
        first = datetime.fromisoformat(meta["deletionTimestamp"])
        began = first - timedelta(seconds=meta["deletionGracePeriodSeconds"])
    meta["deletionTimestamp"] = rfc3339(began + timedelta(seconds=grace))
    meta["deletionGracePeriodSeconds"] = grace
    if "generation" in meta and "deletionTimestamp" not in old.meta:
        meta["generation"] += 1
    return meta


def _terminate_namespace(server: Server, kind: Kind, old: Stored) -> None:
    """Mark a namespace. The collector removes its content first, and then the namespace."""
    if "deletionTimestamp" not in old.meta:
        meta = {**old.meta, "deletionTimestamp": server.now(), "deletionGracePeriodSeconds": 0}
        # The real server keeps this in spec.finalizers. Without it the object would be gone at once.
        raw = {**old.raw, "metadata": meta, "status": {**(old.raw.get("status") or {}), "phase": "Terminating"}}
        server.store.put(kind.id, raw, old)
        server.touched(old.uid)
