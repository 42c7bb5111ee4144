"""Connections to the operator that end soon after a machine falls silent, and that find a living machine.

A machine that lost its power or its network closes no connection, so a caller would wait until its timeout. But its
kernel acknowledges nothing either, and TCP finds that within `SILENT` seconds. A Service stands for several machines,
and each attempt to connect reaches one of them. So while an attempt is not answered, another is made. A slow process is
not mistaken for a lost machine: its kernel still answers, so the caller waits for it. Linux only.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError

from everstep.membership.peers.probe import connect
from everstep.torch_private.libraries import OpensItself

SILENT = 1.5  # seconds in which sent data must be acknowledged; otherwise the connection ends
ALIVE = 1  # seconds of silence before a keepalive probe; a whole number
SPACING = 0.1  # seconds between attempts to connect
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT * 1000)),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ALIVE),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ALIVE),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


def open_connection(host: str, port: int, seconds: float) -> socket.socket:
    """Connect to the host; each of its addresses gets about `seconds` seconds. Raises OSError."""
    attempts = max(1, round(seconds / SPACING))
    last = 0
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        assert kind == socket.SOCK_STREAM
        made = connect(family, address, attempts, SPACING, spacing=SPACING)
        if isinstance(made, socket.socket):
            for option in _OPTIONS:
                made.setsockopt(*option)
            return made
        last = made
    if last:
        raise OSError(last, os.strerror(last))
    raise TimeoutError(errno.ETIMEDOUT, f"no answer in {seconds:g} s")


class _Opening(OpensItself):
    """Overrides how urllib3 opens a connection."""

    def opened(self, host: str) -> socket.socket:
        mine: Any = self
        try:
            made = open_connection(host, mine.port, mine.timeout)
        except socket.gaierror as e:
            raise NameResolutionError(mine.host, mine, e) from e
        except TimeoutError as e:
            raise ConnectTimeoutError(mine, f"no connection to {mine.host}:{mine.port}: {e.strerror}") from e
        except OSError as e:
            raise NewConnectionError(mine, f"no connection to {mine.host}:{mine.port}: {e.strerror}") from e
        made.settimeout(mine.timeout)
        return made


class _Http(_Opening, HTTPConnection):
    pass


class _Https(_Opening, HTTPSConnection):
    pass


class _HttpPool(HTTPConnectionPool):
    ConnectionCls = _Http


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls = _Https


class Pool(PoolManager):
    """urllib3's pool manager, with these connections."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}
