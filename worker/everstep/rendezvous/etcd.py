"""A round store in etcd v3. What it keeps for one job lies under one prefix: `document`, and `present/<agent>`.

The document's version is its mod revision; presence is a key on a lease of its own; one watch of the prefix, in a
thread, sees both. A watch goes on from the revision after the last one seen; where etcd has compacted that away, the
document is read again and a lapse is assumed. Invariant: a view never goes back.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from everstep.rendezvous.errors import RendezvousFailed, StoreUnavailable
from everstep.rendezvous.etcd_http import Gateway, NotFound
from everstep.rendezvous.forks import after_fork
from everstep.rendezvous.store import View

log = logging.getLogger(__name__)

PREFIX = "/everstep/rendezvous"
SILENCE = 5.0  # seconds without a message after which the watch is opened anew: its member may be hung
RETRY = 0.2
MIN_TTL = 2  # etcd makes shorter leases longer


class EtcdStore:
    """One job's round store. Each process that uses it makes its own connections and its own watch."""

    def __init__(self, gateway: Gateway, job: str, prefix: str = PREFIX) -> None:
        self._gateway = gateway
        root = f"{prefix.rstrip('/')}/{quote(job, safe='')}/"
        self._root, self._document, self._present = root, f"{root}document", f"{root}present/"
        self._changed = threading.Condition()
        self._view: View | None = None
        self._known = 0  # the revision at which the view was true
        self._next = 0  # the revision that the watch has not seen
        self._lapses = 0
        self._leases: dict[str, tuple[str, float]] = {}
        self._closed = False
        self._watching = False
        after_fork(self)

    def forked(self) -> None:
        """The child watches for itself, and has no presence of its own yet."""
        self._changed, self._watching, self._leases = threading.Condition(), False, {}

    def read(self) -> View:
        return self._merge(*self._range())

    def compare_and_swap(self, expected: int, document: bytes) -> int | None:
        key = _b64(self._document)
        compare = {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(expected)}
        put = {"request_put": {"key": key, "value": _b64(document)}}
        answer = self._gateway.call("/v3/kv/txn", {"compare": [compare], "success": [put]})
        if not answer.get("succeeded"):
            return None
        version = int(answer["header"]["revision"])
        self._merge(View(document, version), version)
        return version

    def watch(self, seen: View, timeout: float) -> View:
        self._start_watching()
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                view = self._view
                if view is not None and (view.version, view.lapses) != (seen.version, seen.lapses):
                    return view
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    return view or seen
                self._changed.wait(left)

    def announce(self, agent: str, value: bytes, ttl: float) -> None:
        lease, held_ttl = self._leases.get(agent, ("", 0.0))
        if held_ttl != ttl or not self._put(agent, value, lease):
            whole = max(MIN_TTL, math.ceil(ttl))
            lease = str(self._gateway.call("/v3/lease/grant", {"TTL": str(whole)})["ID"])
            if not self._put(agent, value, lease):
                raise StoreUnavailable(f"a lease of {whole} s lapsed before it was used")
        self._leases[agent] = (lease, ttl)

    def renew(self, agent: str) -> bool:
        held = self._leases.get(agent)
        if held is None:
            return False
        answer = self._gateway.call("/v3/lease/keepalive", {"ID": held[0]})
        if int(answer.get("result", {}).get("TTL", 0)) > 0:
            return True
        self._leases.pop(agent, None)
        return False

    def withdraw(self, agent: str) -> None:
        held = self._leases.pop(agent, None)
        if held is not None:
            with contextlib.suppress(StoreUnavailable, NotFound):  # it lapses, or has, by itself
                self._gateway.call("/v3/lease/revoke", {"ID": held[0]})

    def present(self) -> Mapping[str, bytes]:
        answer = self._gateway.call("/v3/kv/range", {"key": _b64(self._present), "range_end": _end(self._present)})
        return {
            _unb64(row["key"]).decode(errors="replace").removeprefix(self._present): _unb64(row.get("value", ""))
            for row in answer.get("kvs", [])
        }

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._gateway.close()

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
        answer = self._gateway.call("/v3/kv/range", {"key": _b64(self._document)})
        rows = answer.get("kvs", [])
        revision = int(answer["header"]["revision"])
        if not rows:
            return View(None, 0, self._lapses), revision
        return View(_unb64(rows[0].get("value", "")), int(rows[0]["mod_revision"]), self._lapses), revision

    def _merge(self, view: View, revision: int) -> View:
        """What is known after this was seen; an older sight than the last changes nothing."""
        with self._changed:
            if self._view is None or revision >= self._known:
                before, self._known = self._view, revision
                self._view = View(view.document, view.version, self._lapses)
                if self._view != before:
                    self._changed.notify_all()
            return self._view

    def _start_watching(self) -> None:
        with self._changed:
            if self._closed or self._watching:
                return
            self._watching = True
        threading.Thread(target=self._follow, name="everstep-etcd-watch", daemon=True).start()

    def _follow(self) -> None:
        while not self._closed:
            try:
                if self._next == 0:
                    view, revision = self._range()
                    self._next = revision + 1
                    self._lapse()  # what lapsed before is not known
                    self._merge(view, revision)
                self._read_stream()
            except RendezvousFailed as e:
                if not self._closed:
                    log.debug("the watch is opened again: %s", e)
                with self._changed:
                    self._changed.wait(RETRY)
            except Exception:
                # A watch that ends silently would leave this agent deaf for good.
                log.exception("the watch of %s failed and is opened again", self._root)
                with self._changed:
                    self._changed.wait(1.0)

    def _read_stream(self) -> None:
        wanted = {"key": _b64(self._root), "range_end": _end(self._root), "start_revision": str(self._next)}
        for message in self._gateway.stream("/v3/watch", {"create_request": wanted}, SILENCE):
            if self._closed:
                return
            result = message.get("result")
            if not isinstance(result, dict):
                self._gateway.forget_token()
                raise StoreUnavailable(f"the watch was refused: {str(message)[:200]}")
            if result.get("canceled"):
                if "compact_revision" in result:
                    log.info("etcd compacted what the watch had not seen: reading anew")
                    self._next = 0
                    return
                self._gateway.forget_token()
                raise StoreUnavailable(f"the watch was cancelled: {result.get('cancel_reason', '')}")
            for event in result.get("events", []):
                self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        row = event["kv"]
        key, revision = _unb64(row["key"]).decode(errors="replace"), int(row["mod_revision"])
        self._next = max(self._next, revision + 1)
        deleted = event.get("type") == "DELETE"
        if key == self._document:
            self._merge(View(None, 0) if deleted else View(_unb64(row.get("value", "")), revision), revision)
        elif deleted and key.startswith(self._present):
            self._lapse()

    def _lapse(self) -> None:
        with self._changed:
            self._lapses += 1
            if self._view is not None:
                self._view = View(self._view.document, self._view.version, self._lapses)
            self._changed.notify_all()


def _b64(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def _unb64(data: str) -> bytes:
    return base64.b64decode(data)


def _end(prefix: str) -> str:
    """The first key after all with this prefix, as etcd wants a range's end."""
    data = prefix.encode()
    return _b64(data[:-1] + bytes([data[-1] + 1]))
