"""TCP ports of the loopback that stay a test's own, though nothing listens at them yet, or for a while."""

from __future__ import annotations

import socket


class Ports:
    """Each is bound, and not listened at: who connects is refused, and the kernel gives it to nobody else. Who has
    SO_REUSEADDR, as servers have it, may listen."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self) -> int:
        one = socket.socket()
        self._held.append(one)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])

    def close(self) -> None:
        while self._held:
            self._held.pop().close()
