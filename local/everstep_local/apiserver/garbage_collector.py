"""Garbage collection: removes objects without an owner, and terminating namespaces with all their objects.

It works through the UIDs that the server touched, as the real collector works through its queue: after the request,
never inside it. Invariant: when the queue is empty, no object exists whose owners are all gone, and no terminating
namespace is empty.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from everstep_local.apiserver.deletion import ORPHAN, delete
from everstep_local.apiserver.kinds.kind import Kind
from everstep_local.apiserver.refusals import Refusal
from everstep_local.apiserver.server import ACCOUNT_TABLE, NAMESPACE_TABLE, Server
from everstep_local.apiserver.storage.store import Stored


class Collector:
    """The collector. `touch` may be called at any time; `collect` does all pending work."""

    def __init__(self) -> None:
        self._queue: deque[str] = deque()
        self._queued: set[str] = set()

    def __len__(self) -> int:
        return len(self._queue)

    def touch(self, uid: str) -> None:
        if uid not in self._queued:
            self._queued.add(uid)
            self._queue.append(uid)

    def collect(self, server: Server) -> None:
        """Collect until nothing is left to do. This ends, because each visit that changes an object removes it or
        shortens one of its lists."""
        while self._queue:
            uid = self._queue.popleft()
            self._queued.discard(uid)
            self._visit(server, uid)

    def _visit(self, server: Server, uid: str) -> None:
        located = server.store.find(uid)
        if located is None:
            for dependent in server.store.dependents(uid):
                self.touch(dependent)
            self._visit_namespaces(server)
            return
        table, stored = located
        kind = server.kinds.at(table)
        if table == NAMESPACE_TABLE:
            self._visit_namespace(server, kind, stored)
            return
        finalizers = stored.meta.get("finalizers") or ()
        if "deletionTimestamp" in stored.meta and ORPHAN in finalizers:
            self._orphan(server, kind, stored)
        else:
            self._dependent(server, kind, stored)

    def _dependent(self, server: Server, kind: Kind, stored: Stored) -> None:
        owners = stored.meta.get("ownerReferences") or []
        live = [owner for owner in owners if self._exists(server, owner, stored)]
        if not owners or len(live) == len(owners):
            return
        if live:
            meta = {**stored.meta, "ownerReferences": live}
            server.put(kind, {**stored.raw, "metadata": meta}, stored)
        elif "deletionTimestamp" not in stored.meta:
            self._delete(server, kind, stored)

    @staticmethod
    def _exists(server: Server, owner: dict[str, Any], dependent: Stored) -> bool:
        """Whether the owner exists, by UID and by name: a reference with the right UID and a wrong name refers to
        nothing."""
        located = server.store.find(owner["uid"])
        if located is None:
            return False
        table, stored = located
        namespace, name = stored.key
        same_namespace = namespace in ("", dependent.key[0])
        return same_namespace and name == owner["name"] and server.kinds.at(table).kind == owner["kind"]

    def _orphan(self, server: Server, kind: Kind, owner: Stored) -> None:
        for uid in server.store.dependents(owner.uid):
            located = server.store.find(uid)
            assert located is not None
            child_kind, child = server.kinds.at(located[0]), located[1]
            owners = [
                owner_reference
                for owner_reference in child.meta["ownerReferences"]
                if owner_reference["uid"] != owner.uid
            ]
            meta = {key: value for key, value in child.meta.items() if key != "ownerReferences"}
            if owners:
                meta["ownerReferences"] = owners
            server.put(child_kind, {**child.raw, "metadata": meta}, child)
        owners = [owner_reference for owner_reference in owner.meta["finalizers"] if owner_reference != ORPHAN]
        meta = {key: value for key, value in owner.meta.items() if key != "finalizers"}
        if owners:
            meta["finalizers"] = owners
        server.put(kind, {**owner.raw, "metadata": meta}, owner)

    def _visit_namespaces(self, server: Server) -> None:
        """Visit terminating namespaces after a removal, which may have been the last in one of them."""
        for namespace in server.store.table(NAMESPACE_TABLE).select(None):
            if "deletionTimestamp" in namespace.meta:
                self.touch(namespace.uid)

    def _visit_namespace(self, server: Server, kind: Kind, namespace: Stored) -> None:
        name = namespace.meta["name"]
        if "deletionTimestamp" not in namespace.meta:
            self._give_account(server, name)
            return
        left = 0
        for table_id, table in tuple(server.store.tables()):
            for stored in table.select(name) if name else ():
                if "deletionTimestamp" not in stored.meta:
                    self._delete(server, server.kinds.at(table_id), stored)
                left += table.get(stored.key) is not None
        if not left:
            server.store.remove(kind.id, namespace)

    @staticmethod
    def _give_account(server: Server, namespace: str) -> None:
        """Give a new namespace its service account `default`."""
        if server.store.table(ACCOUNT_TABLE).get((namespace, "default")) is None:
            server.create(server.kinds.at(ACCOUNT_TABLE), namespace, {"metadata": {"name": "default"}})

    @staticmethod
    def _delete(server: Server, kind: Kind, stored: Stored) -> None:
        namespace, name = stored.key
        try:
            delete(server, kind, namespace, name, uid=stored.uid, propagation="Background")
        except Refusal as refusal:
            raise AssertionError(f"the collector's delete of {kind.plural} {namespace}/{name}: {refusal}") from refusal
