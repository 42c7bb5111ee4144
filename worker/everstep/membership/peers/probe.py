"""Tests whether a peer is reached, from the state of the TCP connections.

The peer's kernel accepts connections and acknowledges data, even for a process that is stopped or waits for a
processor. So a probe shows the state of the network, and of the process only whether its port is open. One packet that
came through both ways is proof that the peer is reached. Missing packets prove nothing until many were sent. Each
attempt is a connection of its own, because TCP waits ever longer before it retransmits. At 30 % loss each way half of
the attempts fail, and all of them once in a million times. Linux only (TCP_INFO).
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from everstep.contract.addresses import host_and_port
from everstep.contract.document import Member
from everstep.contract.fields import MAX_AGENT

HELLO = "everstep-link "
BEAT_BYTE, ANSWER_BYTE = b"?", b"!"  # earlier releases send other beats, and answer none
BEAT = 0.25  # seconds between two bytes over a connection
LOOK_CLOSER = 0.05  # seconds between checks of a byte that is not acknowledged yet
ATTEMPTS = 24
SPACING = 0.05  # seconds between attempts
REST = 0.5  # seconds to wait for the last attempt, at least
MOST_REST = 2.0  # the same, in a slow network
GREETING = 10.0  # seconds to wait for the greeting over an open connection
QUIET = 1.0  # seconds in which a byte must be acknowledged
MOST_QUIET = 1.5  # the same, in a slow network
_INFO = struct.Struct("=24xI40xI")  # of linux/tcp.h's tcp_info: tcpi_unacked and tcpi_rtt


@dataclass(frozen=True, slots=True)
class Reached:
    """The member itself answered, over this connection."""

    connection: socket.socket


@dataclass(frozen=True, slots=True)
class Gone:
    """The member's port is closed, or another agent's."""

    why: str


@dataclass(frozen=True, slots=True)
class Silent:
    """No packet came back."""

    why: str


@dataclass(frozen=True, slots=True)
class Unclear:
    """The probe shows nothing: something answered in another way, or no attempt could be made."""

    why: str


ProbeResult = Reached | Gone | Silent | Unclear


def probe(
    member: Member, stopped: Callable[[], bool], *, attempts: int = ATTEMPTS, rest: float = MOST_REST
) -> ProbeResult:
    """Try to connect to a member until an attempt succeeds; the last one has `rest` seconds."""
    where = f"{host_and_port(member.address, member.link_port)} ({member.agent})"
    try:
        family, _, _, _, address = socket.getaddrinfo(member.address, member.link_port, type=socket.SOCK_STREAM)[0]
        made = connect(family, address, attempts, rest, stopped)
    except OSError as e:  # no such name, or no descriptor left
        return Unclear(f"{where}: {e}")
    if isinstance(made, socket.socket):
        return _greeted(made, member, where)
    if made == errno.ECONNREFUSED:
        return Gone(f"{where} refuses connections")
    if stopped():
        return Unclear(f"{where}: this agent gave up")
    return Silent(f"{where} does not answer: {'timed out' if made == 0 else errno.errorcode.get(made, made)}")


def connect(
    family: int,
    address: Any,
    attempts: int,
    rest: float,
    stopped: Callable[[], bool] = lambda: False,
    spacing: float = SPACING,
) -> socket.socket | int:
    """The first open connection; otherwise ECONNREFUSED, or the last error, or 0 if there was none.

    A new attempt begins every `spacing` seconds, beside those in progress. The socket does not block."""
    tried: dict[int, socket.socket] = {}
    poll = select.poll()
    last = 0
    try:
        for number in range(attempts):
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            tried[sock.fileno()] = sock
            code = sock.connect_ex(address)
            if code in (0, errno.EINPROGRESS):
                poll.register(sock, select.POLLOUT)
            else:
                last = code
            until = time.monotonic() + (spacing if number + 1 < attempts else rest)
            # Poll at least once for each attempt: a process that got no processor meanwhile still finds the answer.
            while True:
                ready = poll.poll(max(0.0, min(SPACING, until - time.monotonic())) * 1e3)
                for descriptor, _ in ready:
                    poll.unregister(descriptor)
                    code = tried[descriptor].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if code == 0:
                        return tried.pop(descriptor)
                    if code == errno.ECONNREFUSED:
                        return code
                    last = code
                if stopped():
                    return last
                if time.monotonic() >= until and not ready:
                    break
        return last
    finally:
        for sock in tried.values():
            sock.close()


def _greeted(sock: socket.socket, member: Member, where: str) -> ProbeResult:
    sock.settimeout(GREETING)
    hello = b""
    try:
        while not hello.endswith(b"\n") and len(hello) < len(HELLO) + MAX_AGENT + 1:
            part = sock.recv(len(HELLO) + MAX_AGENT + 1 - len(hello))
            if not part:
                break
            hello += part
    except OSError as e:
        sock.close()
        return Unclear(f"{where} does not greet: {e}")
    if hello.decode(errors="replace") == f"{HELLO}{member.agent}\n":
        return Reached(sock)
    sock.close()
    if hello:
        return Gone(f"{where} is another agent now")
    return Unclear(f"{where} ended the connection")


class Pulse:
    """Sends a byte every `BEAT` seconds, and watches whether it is acknowledged. The caller calls `beat` as often, and
    more often while a byte is not acknowledged."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        self._connection, self._acknowledged, self._next_at = connection, now, now

    @property
    def round_trip(self) -> float:
        """Seconds, smoothed."""
        return self._info()[1]

    @property
    def waits(self) -> bool:
        """Whether a sent byte is not acknowledged yet."""
        return self._info()[0] > 0

    def beat(self, now: float) -> bool:
        """Send a byte if it is time, and the last one was acknowledged. False if its acknowledgement is overdue. Raises
        OSError."""
        unacknowledged, round_trip = self._info()
        if not unacknowledged:
            self._acknowledged = now
            if now < self._next_at:
                return True
            self._next_at = now + BEAT - LOOK_CLOSER / 2
            with contextlib.suppress(BlockingIOError):
                self._connection.send(BEAT_BYTE, socket.MSG_DONTWAIT)
            return True
        return now - self._acknowledged < min(MOST_QUIET, QUIET + round_trip / 2)

    def _info(self) -> tuple[int, float]:
        """How many sent segments are not acknowledged, and the round-trip time."""
        data = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        unacknowledged, round_trip = _INFO.unpack(data)
        return unacknowledged, round_trip * 1e-6


def rest(round_trip: float) -> float:
    """Seconds to wait for the last attempt to connect in a network with this round-trip time."""
    return min(MOST_REST, max(REST, 1.5 * round_trip))
