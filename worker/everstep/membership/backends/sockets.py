"""A client's pool of connections, whose waits for a server another thread can end by shutting the sockets down.

A read over HTTP lasts until the server answers, and closing urllib3's pool does not end a read in progress. So this
module keeps weak references to the sockets of a pool's connections, and shuts them down when the client closes.
Invariant: after `close`, no new connection is made on which a thread could wait.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any

from urllib3 import PoolManager

from everstep.contract.forks import after_fork
from everstep.membership.errors import StoreUnavailable


class PooledClient:
    """What has one pool in one process. Thread-safe. `make`: a new pool."""

    def __init__(self, make: Callable[[], PoolManager]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._pool: PoolManager | None = None
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._closed = False
        after_fork(self)

    def forked(self) -> None:
        """Leave the parent's sockets alone: two processes must not use one connection, and a shutdown would end it for
        the parent too."""
        self._lock, self._pool, self._open = threading.Lock(), None, weakref.WeakSet()

    def close(self) -> None:
        """End calls in progress too, each of which sees the end of its connection; no later call succeeds."""
        with self._lock:
            self._closed, pool, self._pool = True, self._pool, None
        self._end_connections(pool)

    def _end_connections(self, pool: PoolManager | None) -> None:
        """End the connections of this moment, also those on which other threads wait, and those that are idle."""
        with self._lock:
            mine = list(self._open)
        for connection in mine:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if pool is not None:
            pool.clear()

    def _own_pool(self) -> PoolManager:
        """The pool of this process. Raises StoreUnavailable once this is closed."""
        with self._lock:
            if self._closed:
                raise StoreUnavailable("this agent has closed its round store")
            if self._pool is None:
                self._pool = self._make()
                self._pool.pool_classes_by_scheme = {
                    scheme: self._tracking(made) for scheme, made in self._pool.pool_classes_by_scheme.items()
                }
            return self._pool

    def _made(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.add(connection)
        if self._closed:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _tracking(self, pool: Any) -> Any:
        parent, made = pool.ConnectionCls, self._made

        def connect(connection: Any) -> None:
            parent.connect(connection)
            made(connection.sock)

        tracked = type(parent.__name__, (parent,), {"connect": connect})
        return type(pool.__name__, (pool,), {"ConnectionCls": tracked})


def brief(error: Exception) -> str:
    """The error's text, cut."""
    text = str(error)
    return text if len(text) <= 200 else text[:197] + "..."
