"""The apply verb: server-side apply on the server's transactions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep_operator.local.memory.kinds import Kind
from everstep_operator.local.memory.merging import copied, without_nulls
from everstep_operator.local.memory.ownership import Applied, apply
from everstep_operator.local.memory.refusals import (
    FieldError,
    Refusal,
    bad_request,
    no_such_resource,
    required,
    unprocessable,
)
from everstep_operator.local.memory.server import Server
from everstep_operator.local.memory.store import Json, Stored

MAX_MANAGER = 128  # characters


def apply_object(
    server: Server,
    kind: Kind,
    namespace: str | None,
    name: str,
    body: Mapping[str, Any],
    *,
    manager: str,
    force: bool,
    subresource: str | None,
) -> Stored:
    """Create or change the object. Raises Refusal: 400, 404, 409 where another manager owns a field, 422."""
    if not manager or len(manager) > MAX_MANAGER:
        error = required("fieldManager", f"from 1 to {MAX_MANAGER} characters, for an apply patch")
        raise unprocessable("PatchOptions.meta.k8s.io", "", [error])
    if subresource not in (None, "status"):
        raise no_such_resource()
    config: Json = without_nulls(copied(body))
    config = {
        **config,
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {**(config.get("metadata") or {}), "name": name},
    }
    if config["metadata"].get("managedFields"):
        raise bad_request("metadata.managedFields must be nil")
    owner = (manager, "Apply", subresource or "")
    own = _reachable(kind, config, subresource)
    live = server.store.table(kind.id).get((namespace or "", name))
    if live is None:
        if subresource is not None:
            server.find(kind, namespace, name)
        if config["metadata"].get("resourceVersion") or config["metadata"].get("uid"):
            server.find(kind, namespace, name)
        return server.create(kind, namespace, own, manager, operation="Apply")
    applied = apply(live.raw, server.settle(kind, live.managers, live.writes), own, owner, kind.shape)
    if applied.clashes and not force:
        raise _refused(kind, applied)
    return server.update(
        kind,
        namespace,
        name,
        lambda _: {**applied.raw, "metadata": {**applied.raw["metadata"], **_preconditions(config)}},
        manager=manager,
        operation="Apply",
        subresource=subresource,
        managers=applied.managers,
    )


def _preconditions(config: Json) -> Json:
    return {key: config["metadata"][key] for key in ("resourceVersion", "uid") if config["metadata"].get(key)}


def _reachable(kind: Kind, config: Json, subresource: str | None) -> Json:
    """Without the fields that this endpoint ignores: nobody comes to own them by naming them."""
    if subresource == "status":
        kept = (
            ("apiVersion", "kind", "metadata", "status") if kind.status_metadata else ("apiVersion", "kind", "status")
        )
        return {key: value for key, value in config.items() if key in kept}
    return {key: value for key, value in config.items() if key != "status" or not kind.has_status}


def _refused(kind: Kind, applied: Applied) -> Refusal:
    causes: list[FieldError] = []
    fields: dict[str, list[str]] = {}
    for clash in applied.clashes:
        manager, operation, subresource = clash.owner
        who = f'"{manager}"' + (f' with subresource "{subresource}"' if subresource else "")
        who += f" using {kind.api_version}" if operation == "Update" else ""
        causes.append(_FieldManagerConflict("Conflict", clash.field, f"conflict with {who}"))
        fields.setdefault(who, []).append(clash.field)
    if len(causes) == 1:
        return Refusal(
            409, "Conflict", f"Apply failed with 1 conflict: {causes[0].message}: {causes[0].field}", causes=causes
        )
    text = "\n".join(f"conflicts with {who}:" + "".join(f"\n- {one}" for one in many) for who, many in fields.items())
    return Refusal(409, "Conflict", f"Apply failed with {len(causes)} conflicts: {text}", causes=causes)


class _FieldManagerConflict(FieldError):
    @property
    def reason(self) -> str:
        return "FieldManagerConflict"
