"""Ends a thread's wait for a server from another thread, by shutting its socket down.

A read over HTTP lasts until the server answers, and closing urllib3's pool does not end a read in progress. So this
module keeps weak references to the sockets of a pool's connections, and shuts them down when the pool's owner closes.
Invariant: after `shut`, no new connection is made on which a thread could wait.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from typing import Any, TypeVar

from urllib3 import PoolManager

from everstep.membership.errors import StoreUnavailable

P = TypeVar("P", bound=PoolManager)


class Sockets:
    """The sockets of one client in one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._closed = False

    def forked(self) -> None:
        """Leave the parent's sockets alone: a shutdown would end them for the parent too."""
        self._lock, self._open = threading.Lock(), weakref.WeakSet()

    def of(self, pool: P) -> P:
        """Track the pool: `shut` ends all connections that it makes from now on. Raises StoreUnavailable after that."""
        self._check()
        pool.pool_classes_by_scheme = {
            scheme: self._tracking(made) for scheme, made in pool.pool_classes_by_scheme.items()
        }
        return pool

    def shut(self) -> None:
        """End all of them: each reader sees the end of its connection."""
        with self._lock:
            self._closed, mine = True, list(self._open)
        for connection in mine:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _check(self) -> None:
        if self._closed:
            raise StoreUnavailable("this agent has closed its round store")

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
