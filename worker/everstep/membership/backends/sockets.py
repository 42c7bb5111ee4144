"""Ends what a thread waits for at a server, from another thread.

A read over HTTP lasts for as long as the server has nothing to say, and closing urllib3's pool leaves alone what is
being read. So the sockets of a pool's connections are kept in mind, weakly, and shut down when the pool's owner closes.
Invariant: after `shut` no connection is made that could be waited on.
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
    """Of one client, in one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._closed = False

    def forked(self) -> None:
        """The parent's are left alone: shutting one down would end it for the parent, too."""
        self._lock, self._open = threading.Lock(), weakref.WeakSet()

    def of(self, pool: P) -> P:
        """The pool, whose connections made from now on are ended by `shut`. Raises StoreUnavailable after that."""
        self._check()
        pool.pool_classes_by_scheme = {
            scheme: self._tracking(made) for scheme, made in pool.pool_classes_by_scheme.items()
        }
        return pool

    def shut(self) -> None:
        """End all of them: who reads from one reads its end."""
        with self._lock:
            self._closed, mine = True, list(self._open)
        for one in mine:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _check(self) -> None:
        if self._closed:
            raise StoreUnavailable("this agent has closed its round store")

    def _made(self, one: socket.socket) -> None:
        with self._lock:
            self._open.add(one)
        if self._closed:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _tracking(self, pool: Any) -> Any:
        parent, made = pool.ConnectionCls, self._made

        def connect(connection: Any) -> None:
            parent.connect(connection)
            made(connection.sock)

        tracked = type(parent.__name__, (parent,), {"connect": connect})
        return type(pool.__name__, (pool,), {"ConnectionCls": tracked})
