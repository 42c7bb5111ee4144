"""The verbs of the API server, synchronous, over the store.

Each call is one transaction: it happens as a whole, or raises `Refusal` and changes nothing. Invariant: a write without
a change makes no new version. Other writes raise metadata.generation exactly if they change the kind's `counts` part.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from everstep_local.apiserver.kinds import metadata
from everstep_local.apiserver.kinds.kind import BINDINGS, Kind, Kinds
from everstep_local.apiserver.refusals import (
    Refusal,
    already_exists,
    bad_request,
    conflict,
    failed_precondition,
    invalid,
    no_such_resource,
    not_found,
    required,
    terminating,
    unprocessable,
)
from everstep_local.apiserver.storage.merging import at_path, copied, merged, put_at, same, without_nulls
from everstep_local.apiserver.storage.store import Json, Store, Stored
from everstep_operator.kube.wire import rfc3339
from everstep_operator.runtime.clock import Clock

NAMESPACE_TABLE = ("", "namespaces")
POD_TABLE = ("", "pods")
ACCOUNT_TABLE = ("", "serviceaccounts")
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"  # the letters of generated names

Change = Callable[[Json], Json]


class Server:
    """The server. `touched(uid)` is called for every object that garbage collection has to visit."""

    def __init__(
        self,
        store: Store,
        kinds: Kinds,
        clock: Clock,
        rng: random.Random,
        touched: Callable[[str], None] = lambda uid: None,
    ) -> None:
        self.store, self.kinds, self.clock, self.touched = store, kinds, clock, touched
        self._rng = rng

    def now(self) -> str:
        return rfc3339(self.clock.now())

    def new_uid(self) -> str:
        return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))

    def find(self, kind: Kind, namespace: str | None, name: str) -> Stored:
        """The stored object. Raises Refusal (404)."""
        stored = self.store.table(kind.id).get((namespace or "", name))
        if stored is None:
            raise not_found(kind.full_plural, name)
        return stored

    # ---- create -----------------------------------------------------------------------------------------------------

    def create(self, kind: Kind, namespace: str | None, body: Mapping[str, Any]) -> Stored:
        """Create an object. Raises Refusal: 400, 403 in a terminating namespace, 404 without one, 409 for a taken name,
        422."""
        requested = self._typed(kind, {"apiVersion": kind.api_version, "kind": kind.kind, **copied(body)}, {})
        self._check_kind(kind, requested)
        meta = requested.get("metadata") or {}
        if meta.get("resourceVersion"):
            raise Refusal(500, "", "resourceVersion should not be set on objects to be created")
        if kind.plural == BINDINGS.plural and not kind.group:
            return self._bind(namespace or "", meta.get("name", ""), requested)
        self._check_namespace(kind, namespace, meta)
        name = meta.get("name") or self._generated(meta)
        self._require_namespace(kind, namespace or "", name)
        requested["metadata"] = metadata.of_new(
            meta,
            name=name,
            namespace=namespace or "",
            uid=self.new_uid(),
            now=self.now(),
            counts=kind.counts is not None,
        )
        if kind.has_status and not kind.status_on_create:
            requested.pop("status", None)
        new = kind.prepare(requested, None)
        self._validate(kind, new, None)
        if self.store.table(kind.id).get((namespace or "", name)) is not None:
            raise already_exists(kind.full_plural, name)
        stored = self.store.put(kind.id, new, None)
        if "ownerReferences" in stored.meta or kind.id == NAMESPACE_TABLE:
            self.touched(stored.uid)
        return stored

    def _generated(self, meta: Json) -> str:
        prefix = meta.get("generateName") or ""
        return prefix[:58] + "".join(self._rng.choice(_SUFFIX) for _ in range(5)) if prefix else ""

    @staticmethod
    def _typed(kind: Kind, body: Json, old: Json) -> Json:
        """`body` without the nulls that a typed object cannot hold. Parts that are the same in `old` are not
        checked."""
        meta = body.get("metadata")
        if meta is not None and not isinstance(meta, dict):
            raise bad_request("metadata is not an object")
        # Metadata is typed for every kind.
        return {
            key: without_nulls(value) if value is not old.get(key) and (kind.typed or key == "metadata") else value
            for key, value in (body if meta is not None else {**body, "metadata": {}}).items()
            if value is not None or not kind.typed
        }

    @staticmethod
    def _check_kind(kind: Kind, body: Json) -> None:
        if (body["apiVersion"], body["kind"]) != (kind.api_version, kind.kind):
            raise bad_request(
                f"the object is {body['kind']} of {body['apiVersion']}, the request is for {kind.kind} of "
                f"{kind.api_version}"
            )

    @staticmethod
    def _check_namespace(kind: Kind, namespace: str | None, meta: Json) -> None:
        if kind.namespaced and not namespace:
            raise no_such_resource()
        if meta.get("namespace") and meta["namespace"] != namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")

    def _require_namespace(self, kind: Kind, namespace: str, name: str) -> None:
        if not kind.namespaced:
            return
        stored = self.store.table(NAMESPACE_TABLE).get(("", namespace))
        if stored is None:
            raise not_found("namespaces", namespace)
        if "deletionTimestamp" in stored.meta:
            raise terminating(kind.full_plural, name, namespace)

    def _validate(self, kind: Kind, new: Json, old: Json | None) -> None:
        meta = new["metadata"]
        if not meta["name"]:
            raise unprocessable(kind.full_kind, "", [required("metadata.name", "name or generateName is required")])
        errors = metadata.errors(meta, old and old["metadata"], kind.name_errors(meta["name"]) if old is None else [])
        errors += kind.validate(new, old)
        if errors:
            raise unprocessable(kind.full_kind, meta["name"], errors)

    # ---- update -----------------------------------------------------------------------------------------------------

    def replace(self, kind: Kind, namespace: str | None, name: str, body: Mapping[str, Any]) -> Stored:
        """PUT. Raises Refusal: 400, 404, 409 for another version, 422."""
        requested = {"apiVersion": kind.api_version, "kind": kind.kind, **copied(body)}
        self._check_kind(kind, requested)
        if (self.store.table(kind.id).get((namespace or "", name))) is None and kind.create_on_update:
            new_metadata = {
                k: v for k, v in (requested.get("metadata") or {}).items() if k not in ("resourceVersion", "uid")
            }
            return self.create(kind, namespace, {**requested, "metadata": new_metadata})
        meta = requested.get("metadata") or {}
        if not meta.get("resourceVersion") and not kind.unconditional_update:
            self.find(kind, namespace, name)
            error = invalid("metadata.resourceVersion", 0, "must be specified for an update")
            raise unprocessable(kind.full_kind, name, [error])
        return self.update(kind, namespace, name, lambda _: requested)

    def merge_patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        patch: Mapping[str, Any],
        *,
        subresource: str | None,
    ) -> Stored:
        """JSON merge patch of the object, its status or its scale. Raises Refusal: 400, 404, 409, 422."""
        body = copied(patch)
        if subresource == "scale":
            return self._patch_scale(kind, namespace, name, body)
        return self.update(kind, namespace, name, lambda old: merged(old, body), subresource=subresource)

    def update(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        change: Change,
        *,
        subresource: str | None = None,
    ) -> Stored:
        """Replace the old object by `change(old)`, as far as `subresource` allows."""
        if subresource not in (None, "status") or (subresource == "status" and not kind.has_status):
            raise no_such_resource()
        old = self.find(kind, namespace, name)
        requested = self._typed(kind, change(old.raw), old.raw)
        self._check_kind(kind, requested)
        self._check_versions(kind, name, requested["metadata"], old)
        self._check_namespace(kind, namespace, requested["metadata"])
        new = kind.prepare(self._isolated(kind, requested, old.raw, subresource), old.raw)
        meta = new["metadata"]
        unchanged = {**old.raw, "metadata": {k: v for k, v in old.meta.items() if k != "resourceVersion"}}
        if new == unchanged or (kind.typed and same(new, unchanged)):
            return old
        self._validate(kind, new, old.raw)
        if kind.counts is not None and kind.counts(new) != kind.counts(old.raw):
            new = {**new, "metadata": {**meta, "generation": old.meta.get("generation", 0) + 1}}
        return self.put(kind, new, old)

    def put(self, kind: Kind, new: Json, old: Stored) -> Stored:
        """Store `new`, which was checked. If `new` removes the last finalizer of a deleted object, remove the
        object."""
        meta = new["metadata"]
        if "deletionTimestamp" in meta and not meta.get("finalizers") and not meta.get("deletionGracePeriodSeconds"):
            # The object is deleted in its old state: only the sender sees the one without finalizers, and no watcher
            # does.
            last = self.remove(kind, old)
            version = {"resourceVersion": last.meta["resourceVersion"]}
            return Stored({**new, "metadata": {**meta, **version}}, last.version)
        stored = self.store.put(kind.id, new, old)
        if meta.get("ownerReferences") != old.meta.get("ownerReferences") or "deletionTimestamp" in meta:
            self.touched(stored.uid)
        return stored

    def remove(self, kind: Kind, old: Stored) -> Stored:
        """Remove the object from the store. Returns its last state."""
        last = self.store.remove(kind.id, old)
        self.touched(last.uid)
        return last

    @staticmethod
    def _check_versions(kind: Kind, name: str, meta: Json, old: Stored) -> None:
        if meta.get("name", name) != name:
            raise bad_request(f"the name of the object ({meta['name']}) does not match the name on the URL ({name})")
        if meta.get("uid") and meta["uid"] != old.uid:
            raise failed_precondition(kind.full_plural, name, "UID", meta["uid"], old.uid)
        version = meta.get("resourceVersion")
        if version and version != old.meta["resourceVersion"]:
            if not str(version).isdigit():
                raise Refusal(500, "", f'strconv.ParseUint: parsing "{version}": invalid syntax')
            raise conflict(kind.full_plural, name)

    @staticmethod
    def _isolated(kind: Kind, requested: Json, old: Json, subresource: str | None) -> Json:
        """The object with those parts of `given` that this request may write, and the others unchanged."""
        if subresource == "status":
            new = {key: value for key, value in old.items() if key != "status"}
            if "status" in requested:
                new["status"] = requested["status"]
            if kind.status_metadata:
                meta = {**requested["metadata"], "ownerReferences": old["metadata"].get("ownerReferences")}
                new["metadata"] = metadata.of_changed(meta, old["metadata"])
            else:
                new["metadata"] = metadata.of_changed(old["metadata"], old["metadata"])
            return new
        new = {**requested, "metadata": metadata.of_changed(requested["metadata"], old["metadata"])}
        if kind.has_status:
            new.pop("status", None)
            if "status" in old:
                new["status"] = old["status"]
        return new

    # ---- subresources -----------------------------------------------------------------------------------------------

    def _patch_scale(self, kind: Kind, namespace: str | None, name: str, patch: Json) -> Stored:
        scale = kind.scale
        if scale is None:
            raise no_such_resource()
        old = self.find(kind, namespace, name)
        seen = self._scale(kind, old)
        wanted = merged(seen, patch)
        replicas = at_path(wanted, ("spec", "replicas"))
        if not isinstance(replicas, int) or isinstance(replicas, bool):
            raise bad_request(f"spec.replicas: {replicas!r} is no whole number")

        def change(raw: Json) -> Json:
            meta = {**raw["metadata"], "resourceVersion": wanted["metadata"].get("resourceVersion")}
            return put_at({**raw, "metadata": meta}, scale.replicas, replicas)

        new = self.update(kind, namespace, name, change)
        return Stored(self._scale(kind, new), new.version)

    def _scale(self, kind: Kind, stored: Stored) -> Json:
        assert kind.scale is not None
        fields = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        status: Json = {"replicas": at_path(stored.raw, kind.scale.status_replicas) or 0}
        if selector := at_path(stored.raw, kind.scale.selector):
            status["selector"] = selector
        return {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {field: stored.meta[field] for field in fields if field in stored.meta},
            "spec": {"replicas": at_path(stored.raw, kind.scale.replicas) or 0},
            "status": status,
        }

    def _bind(self, namespace: str, name: str, binding: Json) -> Stored:
        """Assign a pod to a node, once."""
        pods = self.kinds.at(POD_TABLE)
        old = self.find(pods, namespace, name)
        target = (binding.get("target") or {}).get("name")
        if not target:
            raise unprocessable("Binding", name, [required("target.name")])
        if "deletionTimestamp" in old.meta:
            raise conflict("pods/binding", name, f"pod {name} is being deleted, cannot be assigned to a host")
        if node := at_path(old.raw, ("spec", "nodeName")):
            raise conflict("pods/binding", name, f'pod {name} is already assigned to node "{node}"')
        status = old.raw.get("status") or {}
        others = [c for c in status.get("conditions") or () if c["type"] != "PodScheduled"]
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": self.now()}
        new = put_at(old.raw, ("spec", "nodeName"), target)
        new = put_at(new, ("status", "conditions"), [*others, scheduled])
        self.put(pods, new, old)
        return Stored({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}, old.version)
