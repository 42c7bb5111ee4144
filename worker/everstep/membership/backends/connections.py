"""Connections to the operator that do not outlive a silent machine, and that find the living one behind an address.

A machine that lost its power or its network ends no connection: who asks over one waits for as long as it has patience
for an answer. But its kernel acknowledges nothing either, and that is known within `SILENT` seconds. And behind a
Service are several machines, of which each attempt to connect gets one: while an attempt is not answered, another is
made. A slow process is none of this: its kernel answers, and it is waited for. Linux only.
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

SILENT = 1.5  # seconds in which what was sent is acknowledged, or its connection is over
ALIVE = 1  # seconds without a word after which the other kernel is asked whether it is there; whole ones
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
    """A connection within about so many seconds for each address of the host. Raises OSError."""
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


class _Opening:
    """What urllib3 asks for a new connection."""

    def _new_conn(self) -> socket.socket:
        mine: Any = self
        try:
            made = open_connection(mine._dns_host, mine.port, mine.timeout)
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
    """urllib3's, with such connections."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}
