"""Makes small what asyncio keeps for a connection by TLS. It expects the few connections of a client.

Each of its protocols has a buffer of 256 KiB for what comes, so a thousand connections would take 256 MiB. And a
handshake that failed leaves a cycle: its error, whose traceback holds the protocol. Collections are rare here
(`garbage_collection`), and whoever does not trust the operator tries again and again. Both are changed in the class
itself, which `asyncio` offers no way to choose.
"""

from __future__ import annotations

import asyncio
from asyncio import sslproto
from typing import Any

BUFFER = 16 * 1024  # bytes: a record of TLS has no more
CLEARED = 0.5  # seconds after the failure, when asyncio has handed its error on


def make_small() -> None:
    """For all connections by TLS of this process. A second call changes nothing."""
    protocol: Any = sslproto.SSLProtocol
    if protocol.max_size == BUFFER:
        return
    protocol.max_size = BUFFER
    complete = protocol._on_handshake_complete

    def completed(self: Any, error: BaseException | type[BaseException] | None) -> None:
        if isinstance(error, type):  # of a connection that has ended meanwhile
            error = error()
        complete(self, error)
        if error is not None:
            asyncio.get_running_loop().call_later(CLEARED, error.with_traceback, None)

    protocol._on_handshake_complete = completed
