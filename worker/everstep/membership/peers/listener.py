"""The listening end of the connections between agents.

It sends this agent's name to each guest (a peer that connects), and keeps the connection until the guest ends it. A
guest's bytes are dropped: its kernel shows it that they arrived, and it needs no other answer.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading

from everstep.membership.peers.probe import HELLO

MOST_GUESTS = 64  # connections taken; more are dropped
CLOSE_SECONDS = 5.0
KEEP_ALIVE = (30, 10, 3)  # TCP keepalive, which drops a lost guest: seconds of silence, seconds between probes, probes


class Listener:
    """Listens at `port`, in a thread of its own."""

    def __init__(self, agent: str, host: str) -> None:
        self._hello = f"{HELLO}{agent}\n".encode()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), backlog=MOST_GUESTS, family=family)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker = _Waker(self._selector)
        self._guests: set[socket.socket] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="everstep-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and the thread."""
        self._closed = True
        self._waker.wake()
        self._thread.join(CLOSE_SECONDS)

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._greet()
                elif key.fileobj in self._guests and isinstance(key.fileobj, socket.socket):
                    self._heard(key.fileobj)
                else:
                    self._waker.drain()
        for one in (*self._guests, self._listener):
            one.close()
        self._waker.close()
        self._selector.close()

    def _greet(self) -> None:
        with contextlib.suppress(OSError):
            guest, _ = self._listener.accept()
            guest.setblocking(False)
            if len(self._guests) >= MOST_GUESTS:
                guest.close()
                return
            guest.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in zip(
                (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT), KEEP_ALIVE, strict=True
            ):
                guest.setsockopt(socket.IPPROTO_TCP, option, value)
            guest.send(self._hello)
            self._guests.add(guest)
            self._selector.register(guest, selectors.EVENT_READ)

    def _heard(self, guest: socket.socket) -> None:
        if _ended(guest):
            self._guests.remove(guest)
            self._selector.unregister(guest)
            guest.close()


class _Waker:
    """Ends a `select` from another thread."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        selector.register(self._far, selectors.EVENT_READ)

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self._near.send(b"x")

    def drain(self) -> None:
        with contextlib.suppress(OSError):
            self._far.recv(64)

    def close(self) -> None:
        self._near.close()
        self._far.close()


def _ended(sock: socket.socket) -> bool:
    """Whether the guest has ended the connection. Bytes that it sent are read and dropped."""
    try:
        return not sock.recv(256)
    except BlockingIOError:
        return False
    except OSError:
        return True
