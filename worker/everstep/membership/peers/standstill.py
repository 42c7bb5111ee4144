"""Judges whether a peer's process stands still though its kernel answers: the node is frozen, or the process stopped.

A live process answers each beat, and greets who connects. Over a bad network both may be late: TCP waits ever longer
before it sends again what was lost. So an overdue answer only raises the question, and new connections decide. The
peer's kernel accepts them, which shows that packets come through both ways; a process that runs greets over one of
them. If none of `CONNECTIONS` brings a greeting until the peer's lease is over, its process stands still.

Invariants: one sign of the process clears it; time in which this process did not run itself does not count; a peer of
an earlier release, which answers no beat, is never judged.
"""

from __future__ import annotations

import contextlib
import select
import socket
from dataclasses import dataclass

from everstep.contract.document import Member

CONNECTIONS = 4  # that the peer's kernel has accepted; its backlog has room for those of sixteen members
UNGREETED = 1.0  # seconds that each of them is without a greeting, at least
ROUND_TRIPS = 6.0  # the same, in round trips: in a slow network a greeting may be lost and sent again
LONGEST_LOOK = 0.5  # seconds that count between two looks: what is longer was a pause of this process


@dataclass(slots=True)
class _Attempt:
    sock: socket.socket
    accepted_at: float | None = None


class Standstill:
    """Of one peer, as one follower sees it. `lease`: seconds without a sign after which the process stands still."""

    def __init__(self, member: Member, lease: float, now: float) -> None:
        self._member, self._lease = member, lease
        self._answers = False  # whether it has ever answered a beat
        self._unheard = 0.0
        self._looked_at = self._next_at = now
        self._attempts: list[_Attempt] = []

    def clear(self) -> None:
        """The process has answered."""
        self._answers, self._unheard = True, 0.0
        self.close()

    def look(self, now: float, round_trip: float) -> bool:
        """Whether the process has stood still for the whole lease. `round_trip`: of the network, in seconds."""
        self._unheard += min(now - self._looked_at, LONGEST_LOOK)
        self._looked_at = now
        if not self._answers or self._unheard < self._lease / 3:
            return False
        if any(self._is_greeted(attempt, now) for attempt in list(self._attempts)):
            self.clear()
            return False
        if len(self._attempts) < CONNECTIONS and now >= self._next_at:
            self._next_at = now + self._lease / 12
            self._connect()
        patience = max(UNGREETED, ROUND_TRIPS * round_trip)
        silent = [a for a in self._attempts if a.accepted_at is not None and now - a.accepted_at >= patience]
        return self._unheard >= self._lease and len(silent) >= CONNECTIONS

    def close(self) -> None:
        """End the connections."""
        for attempt in self._attempts:
            attempt.sock.close()
        self._attempts.clear()

    def _connect(self) -> None:
        with contextlib.suppress(OSError):  # no descriptor is left: the next look tries again
            family, _, _, _, address = socket.getaddrinfo(
                self._member.address, self._member.link_port, type=socket.SOCK_STREAM
            )[0]
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            sock.connect_ex(address)
            self._attempts.append(_Attempt(sock))

    def _is_greeted(self, attempt: _Attempt, now: float) -> bool:
        """Whether the process has greeted. A connection that failed or ended shows nothing, and is dropped."""
        poll = select.poll()
        poll.register(attempt.sock, select.POLLOUT)
        if not poll.poll(0):
            return False  # the kernel has not answered yet
        try:
            if attempt.sock.recv(1):
                return True
        except BlockingIOError:
            attempt.accepted_at = now if attempt.accepted_at is None else attempt.accepted_at
            return False
        except OSError:
            pass
        attempt.sock.close()
        self._attempts.remove(attempt)
        return False
