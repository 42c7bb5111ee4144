"""Looks host names up, and goes on with the addresses that a name had last where its servers are late.

A cluster has two or more name servers, on nodes like others. If one is lost with its node, for most of a minute a part
of the lookups goes there, and each of these waits five seconds and more. That is longer than a lease, and the name of a
Service has the same address all the time. So a lookup goes on in a thread. Invariants: a name without addresses yet is
waited for, as `getaddrinfo` does; a name that is gone leads nowhere; there is one lookup of a name at a time.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from typing import Any, TypeAlias

from everstep.contract.forks import after_fork

LATE = 0.5  # seconds after which the last addresses are taken
_GONE = (socket.EAI_NONAME, socket.EAI_NODATA)

Addresses: TypeAlias = list[tuple[Any, ...]]


class _Lookup:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.addresses: Addresses | None = None
        self.error: OSError | None = None


class Names:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[tuple[str, int], Addresses] = {}
        self._under_way: dict[tuple[str, int], _Lookup] = {}
        after_fork(self)

    def forked(self) -> None:
        """The lookups' threads are the parent's."""
        self._lock, self._under_way = threading.Lock(), {}

    def find(self, host: str, port: int) -> Addresses:
        """What `socket.getaddrinfo` gives for a stream. Raises OSError."""
        if _is_address(host):
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with self._lock:
            key = host, port
            last, lookup = self._last.get(key), self._under_way.get(key)
            late = lookup is not None
            if lookup is None:
                lookup = self._under_way[key] = _Lookup()
                threading.Thread(target=self._look_up, args=(key, lookup), name="everstep-names", daemon=True).start()
        if last is None:
            lookup.ended.wait()
        elif not lookup.ended.wait(0 if late else LATE):
            return last
        if lookup.addresses is not None:
            return lookup.addresses
        assert lookup.error is not None
        if last is None or _is_gone(lookup.error):
            raise lookup.error
        return last

    def _look_up(self, key: tuple[str, int], lookup: _Lookup) -> None:
        try:
            lookup.addresses = socket.getaddrinfo(*key, type=socket.SOCK_STREAM)
        except OSError as e:
            lookup.error = e
        except Exception as e:  # a name that cannot be written in a question
            lookup.error = socket.gaierror(socket.EAI_NONAME, str(e))
        with self._lock:
            if self._under_way.get(key) is lookup:
                del self._under_way[key]
            if lookup.addresses is not None:
                self._last[key] = lookup.addresses
            elif lookup.error is not None and _is_gone(lookup.error):
                self._last.pop(key, None)
        lookup.ended.set()


def _is_gone(error: OSError) -> bool:
    return error.errno in _GONE


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
