"""A round store in etcd v3. The keys of one job have one prefix: `document`, and `present/<agent>`.

The document's version is its mod revision. An agent's presence is a key on a lease of its own. A thread watches the
document and the presences that end. It does not watch those that begin: each of a thousand starting agents would hear
of every other one. A watch goes on from the revision after the last one seen. If etcd has compacted that revision, the
document is read again and an expiration is assumed. An expiration is assumed too if etcd has lost its data, or was
restored to an older state; its revision or the document's shows that, and a new era begins.
Invariant: within an era, a view never goes back.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from everstep.membership.backends.etcd_http import Gateway, NotFound
from everstep.membership.backends.watching import Watching
from everstep.membership.errors import StoreUnavailable
from everstep.membership.store import View

log = logging.getLogger(__name__)

PREFIX = "/everstep/rendezvous"
SILENCE = 5.0  # seconds without a message after which the watch is reopened: the etcd member may hang
_DOCUMENT, _EXPIRATIONS = "1", "2"  # the watches on one stream
MIN_TTL = 2  # etcd makes shorter leases longer


class EtcdStore(Watching):
    """One job's round store."""

    def __init__(self, gateway: Gateway, job: str, prefix: str = PREFIX) -> None:
        super().__init__()
        self._gateway = gateway
        root = f"{prefix.rstrip('/')}/{quote(job, safe='')}/"
        self._root, self._document, self._present = root, f"{root}document", f"{root}present/"
        self._known = 0  # the store's revision at which the view was read
        self._next: dict[str, int] = {}  # by watch, the first revision that it has not seen
        self._expirations = self._era = 0
        self._leases: dict[str, tuple[str, float]] = {}

    def forked(self) -> None:
        """The child has no presence of its own yet."""
        super().forked()
        self._leases = {}

    def read(self) -> View:
        return self._merge(*self._range())

    def compare_and_swap(self, expected: int, document: bytes) -> int | None:
        key = _b64(self._document)
        compare = {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(expected)}
        put = {"request_put": {"key": key, "value": _b64(document)}}
        known = self._known
        answer = self._gateway.call("/v3/kv/txn", {"compare": [compare], "success": [put]})
        version = self._revision(answer, known)
        if not answer.get("succeeded"):
            return None
        self._merge(View(document, version, 0, self._era), version)
        return version

    def announce(self, agent: str, value: bytes, ttl: float) -> float:
        lease, held_ttl = self._leases.get(agent, ("", 0.0))
        if held_ttl != ttl or not self._put(agent, value, lease):
            whole = max(MIN_TTL, math.ceil(ttl))
            lease = str(self._gateway.call("/v3/lease/grant", {"TTL": str(whole)})["ID"])
            if not self._put(agent, value, lease):
                raise StoreUnavailable(f"a lease of {whole} s expired before it was used")
        self._leases[agent] = (lease, ttl)
        return 0.0

    def renew(self, agent: str) -> bool:
        lease = self._leases.get(agent)
        if lease is None:
            return False
        answer = self._gateway.call("/v3/lease/keepalive", {"ID": lease[0]})
        if int(answer.get("result", {}).get("TTL", 0)) > 0:
            return True
        self._leases.pop(agent, None)
        return False

    def withdraw(self, agent: str) -> None:
        lease = self._leases.pop(agent, None)
        if lease is not None:
            with contextlib.suppress(StoreUnavailable, NotFound):  # the lease expires, or has expired
                self._gateway.call("/v3/lease/revoke", {"ID": lease[0]})

    def present(self) -> Mapping[str, bytes]:
        answer = self._gateway.call("/v3/kv/range", {"key": _b64(self._present), "range_end": _end(self._present)})
        return {
            _unb64(row["key"]).decode(errors="replace").removeprefix(self._present): _unb64(row.get("value", ""))
            for row in answer.get("kvs", [])
        }

    # --- inside

    def _put(self, agent: str, value: bytes, lease: str) -> bool:
        """False if there is no such lease any more."""
        try:
            self._gateway.call("/v3/kv/put", {"key": _b64(self._present + agent), "value": _b64(value), "lease": lease})
        except NotFound:
            return False
        return True

    def _range(self) -> tuple[View, int]:
        """The document now, and the revision of the store."""
        with self._changed:
            known, before = self._known, self._view
        answer = self._gateway.call("/v3/kv/range", {"key": _b64(self._document)})
        rows = answer.get("kvs", [])
        version = int(rows[0]["mod_revision"]) if rows else 0
        # The store's revision shows no restore if other jobs have written since, or if it was raised. The document's
        # own revision shows it then.
        older = before is not None and 0 < version < before.version
        revision = self._revision(answer, known, older=older)
        return View(_unb64(rows[0].get("value", "")) if rows else None, version, self._expirations, self._era), revision

    def _revision(self, answer: Mapping[str, Any], known: int, *, older: bool = False) -> int:
        """The store's revision in an answer; `known` was the newest revision when the call was made.

        Reads and writes of etcd are linearizable, so a smaller revision means that the store was emptied or restored to
        an older state. `older`: the document's own revision shows that."""
        revision = int(answer["header"]["revision"])
        with self._changed:
            if (revision < known or older) and known == self._known:
                log.warning("etcd has lost what it held, or was put back: revision %d, after %d", revision, known)
                self._known, self._view, self._next = 0, None, {}
                self._era += 1
                self._count_expiration()
        return revision

    def _merge(self, view: View, revision: int) -> View:
        """The newest view after `view` was read; a view older than the known one changes nothing."""
        with self._changed:
            if self._view is None or revision >= self._known:
                before, self._known = self._view, revision
                self._view = View(view.document, view.version, self._expirations, view.era)
                if self._view != before:
                    self._changed.notify_all()
            return self._view

    def _follow(self) -> bool:
        # Read each time: after a restore of etcd, revisions repeat, and a watch on future revisions would not show it.
        view, revision = self._range()
        if not self._next:
            self._next = {_DOCUMENT: revision + 1, _EXPIRATIONS: revision + 1}
            self._count_expiration()  # a presence may have expired before the watch began
            self._merge(view, revision)
        return self._read_stream()

    def _disconnect(self) -> None:
        self._gateway.close()

    def _read_stream(self) -> bool:
        """Read the stream until it ends; whether any message came."""
        received = False
        ends = {"range_end": _end(self._present), "filters": ["NOPUT"]}
        wanted = [self._wanted(_DOCUMENT, self._document, {}), self._wanted(_EXPIRATIONS, self._present, ends)]
        for message in self._gateway.stream("/v3/watch", wanted, SILENCE):
            if self._closed:
                return received
            received = True
            result = message.get("result")
            if not isinstance(result, dict):
                self._gateway.forget_token()
                raise StoreUnavailable(f"the watch was refused: {str(message)[:200]}")
            if result.get("canceled"):
                if "compact_revision" in result:
                    log.info("etcd compacted what the watch had not seen: reading anew")
                    self._next = {}
                    return received
                self._gateway.forget_token()
                raise StoreUnavailable(f"the watch was cancelled: {result.get('cancel_reason', '')}")
            for event in result.get("events", []):
                self._apply_event(event)
            self._passed(result)
        return received

    def _wanted(self, watch: str, key: str, more: Mapping[str, Any]) -> dict[str, Any]:
        # Progress notices move an idle watch's start revision forward, so that a compaction does not pass it.
        start = {"start_revision": str(self._next[watch]), "progress_notify": True}
        return {"create_request": {"watch_id": watch, "key": _b64(key), **start, **more}}

    def _passed(self, result: Mapping[str, Any]) -> None:
        """Remember that the watch, if it is opened again, goes on behind this result."""
        events, watch = result.get("events", []), str(result.get("watch_id", 0))
        if watch in self._next and not result.get("created"):
            revisions = [int(event["kv"]["mod_revision"]) for event in events] or [int(result["header"]["revision"])]
            self._next[watch] = max(self._next[watch], max(revisions) + 1)

    def _apply_event(self, event: Mapping[str, Any]) -> None:
        row = event["kv"]
        key, revision = _unb64(row["key"]).decode(errors="replace"), int(row["mod_revision"])
        deleted = event.get("type") == "DELETE"
        if key == self._document:
            document = None if deleted else _unb64(row.get("value", ""))
            self._merge(View(document, 0 if deleted else revision, 0, self._era), revision)
        elif deleted and key.startswith(self._present):
            self._count_expiration()

    def _count_expiration(self) -> None:
        with self._changed:
            self._expirations += 1
            if self._view is not None:
                self._view = replace(self._view, expirations=self._expirations)
            self._changed.notify_all()


def _b64(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def _unb64(data: str) -> bytes:
    return base64.b64decode(data)


def _end(prefix: str) -> str:
    """The end of etcd's key range for this prefix: the first key after all that have it."""
    data = prefix.encode()
    return _b64(data[:-1] + bytes([data[-1] + 1]))
