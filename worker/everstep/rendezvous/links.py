"""Connections between agents, by which the death of one is known in milliseconds.

Each member of a round connects to the next two in rank order (in a ring) and does nothing more: when a process dies,
its kernel ends the connection. Then an attempt to connect again decides. Refused, or answered by another agent: the
process is gone. Not answered, three times: these two do not reach each other. Who was never reached is not called gone,
because a firewall refuses too. Knows neither store nor document. A stopped process keeps its connections: it is the
lease's.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import threading
from enum import Enum, auto
from typing import Protocol

from everstep.contract.document import MAX_AGENT, Member
from everstep.rendezvous.participant import Round

log = logging.getLogger(__name__)

NEIGHBOURS = 2
PATIENCE = 5.0  # seconds for a connection and its greeting: a slow network is no broken one
ATTEMPTS = 3
MOST_PEERS = 64  # connections taken; more are dropped
_HELLO = "everstep-link "


class Found(Enum):
    """What an attempt to connect showed."""

    THERE = auto()
    GONE = auto()
    SILENT = auto()


class Listener(Protocol):
    """Is told what the connections show. Called from their threads."""

    def lost(self, agent: str, why: str) -> None:
        """The agent's process is gone."""

    def reached(self, agent: str, reaches: bool) -> None:
        """The agent does not answer; or does again, after that."""


class Links:
    """The listening end, and one thread for each neighbour in the present round.

    They outlive the round until the next one is formed: who dies while the others join is known as fast.
    """

    def __init__(self, agent: str, host: str = "") -> None:
        self._greeter = _Greeter(agent, host)
        self.port = self._greeter.port
        self._followed: dict[tuple[str, str, int], _Follower] = {}

    def follow(self, formed: Round, listener: Listener) -> None:
        """Connect to the neighbours in this round, and to no others any more."""
        near = {}
        for step in range(1, min(NEIGHBOURS, formed.world_size - 1) + 1):
            member = formed.members[(formed.rank + step) % formed.world_size]
            if member.link_port:
                near[(member.agent, member.address, member.link_port)] = member
        for key in set(self._followed) - set(near):
            self._followed.pop(key).stop()
        for key in set(near) - set(self._followed):
            self._followed[key] = _Follower(near[key], listener)

    def close(self) -> None:
        """End all connections and threads."""
        self._greeter.close()
        for follower in self._followed.values():
            follower.stop()
        self._followed.clear()


class _Follower:
    """The connection to one member, in a thread that ends when the member is gone."""

    def __init__(self, member: Member, listener: Listener) -> None:
        self._member, self._listener = member, listener
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        threading.Thread(target=self._run, name=f"everstep-link-{member.agent}", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        with self._lock:
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        silent, met = 0, False
        while not self._stopped.is_set():
            sock, found, why = _reach(self._member)
            if self._stopped.is_set():
                break
            if sock is not None:
                if silent >= ATTEMPTS:
                    self._listener.reached(self._member.agent, True)
                silent, met = 0, True
                self._hold(sock)
            elif found is Found.GONE and met:
                self._listener.lost(self._member.agent, why)
                return
            else:
                silent += 1
                log.warning("%s", why)
                if silent == ATTEMPTS:
                    self._listener.reached(self._member.agent, False)
                self._stopped.wait(min(5.0, 0.02 * 4**silent))

    def _hold(self, sock: socket.socket) -> None:
        """Until the connection ends, or this is stopped."""
        with self._lock:
            self._sock = sock
        # A stop that came before this saw no socket.
        with sock, contextlib.suppress(OSError):
            sock.settimeout(None)
            while not self._stopped.is_set() and sock.recv(256):
                pass
        with self._lock:
            self._sock = None


class _Greeter:
    """Tells whoever connects which agent this is, and keeps the connection until the other ends it."""

    def __init__(self, agent: str, host: str) -> None:
        self._hello = f"{_HELLO}{agent}\n".encode()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), backlog=MOST_PEERS, family=family)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker = _Waker(self._selector)
        self._guests: set[socket.socket] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="everstep-greeter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._waker.wake()
        self._thread.join(PATIENCE)

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
            if len(self._guests) >= MOST_PEERS:
                guest.close()
                return
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
    """A peer has nothing to say: whatever can be read is the end, or noise to drop."""
    try:
        return not sock.recv(256)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _reach(member: Member) -> tuple[socket.socket | None, Found, str]:
    """A connection that the member itself greeted, or what was found instead and why."""
    where = f"{member.address}:{member.link_port}"
    try:
        sock = socket.create_connection((member.address, member.link_port), timeout=PATIENCE)
    except OSError as e:
        gone = e.errno == errno.ECONNREFUSED
        return None, Found.GONE if gone else Found.SILENT, f"{where} ({member.agent}): {e}"
    hello = b""
    try:
        while not hello.endswith(b"\n") and len(hello) < len(_HELLO) + MAX_AGENT + 1:
            part = sock.recv(len(_HELLO) + MAX_AGENT + 1 - len(hello))
            if not part:
                break
            hello += part
    except OSError as e:
        sock.close()
        return None, Found.SILENT, f"{where} ({member.agent}): {e}"
    if hello.decode(errors="replace") == f"{_HELLO}{member.agent}\n":
        return sock, Found.THERE, ""
    sock.close()
    if hello:
        return None, Found.GONE, f"{where} is not {member.agent} any more"
    return None, Found.SILENT, f"{where} ({member.agent}) ended the connection"
