"""The peer monitor: connections between agents show early that an agent died, or that two do not reach each other.

Each member of a round connects to the next two in rank order (in a ring). With up to `SMALL` members, each pair has a
connection. When a process dies, its kernel ends the connection within milliseconds. When packets are lost in one or
both directions, sent data is not acknowledged. Then new attempts to connect decide (`probe`):

- If one is refused, or answered by another agent, the process is gone.
- If no packet comes back, these two do not reach each other. That is known within `DETECTED` seconds.

The peer's process answers each byte too. If it does not for a whole lease, though its kernel accepts connections, it
stands still (`standstill`), and is reported like one that is gone: the store might not say so, because the machine that
is frozen may have held it.

In a larger world, pairs that are further apart are probed in turn, one at a time, so that an agent's traffic does not
grow with the world. A member that was never reached is not called gone, because a firewall refuses connections too.
This module knows neither store nor document.

Invariants: an agent that reported an unreached peer probes it until it answers, whatever round it is in. It withdraws
the report once the connection has held for `probation` seconds. An agent that found a peer gone reports that until all
know it. An agent that found one silent repeats its report for `PATIENCE` seconds, and then probes again.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol, assert_never

from everstep.contract.document import Member
from everstep.membership.peers.probe import (
    ANSWER_BYTE,
    ATTEMPTS,
    BEAT,
    BEAT_BYTE,
    HELLO,
    LOOK_CLOSER,
    MOST_REST,
    Gone,
    Pulse,
    Reached,
    Silent,
    Unclear,
    probe,
    rest,
)
from everstep.membership.peers.standstill import Standstill
from everstep.membership.world_state import Round

# --- far probe
# Probes the members that are not neighbours in the ring of connections, one at a time, in turn, for ever. So an agent's
# traffic does not grow with the world. Invariant: nothing is decided here. A member that does not answer is handed to
# the peer monitor for a closer look.

FIRST_LAP = 0.25  # seconds between two far members in the first pass over all of them
LATER_LAPS = 2.0


class FarProbe:
    """Probes one member after the other, for ever."""

    def __init__(self, members: list[Member], suspect: Callable[[Member], None]) -> None:
        self._members, self._suspect = members, suspect
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="everstep-far-probe", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        pause = FIRST_LAP
        while True:
            for member in self._members:
                if self._stopped.wait(pause):
                    return
                result = probe(member, self._stopped.is_set, attempts=1, rest=MOST_REST)
                if isinstance(result, Reached):
                    result.connection.close()
                elif isinstance(result, Silent) and not self._stopped.is_set():
                    self._suspect(member)
            pause = LATER_LAPS


# --- listener
# The listening end of the connections between agents. It sends this agent's name to each guest (a peer that connects),
# answers its beats, and keeps the connection until the guest ends it. The guest's kernel shows that the bytes arrived;
# the answer shows that this process runs.

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
                    self._receive(key.fileobj)
                else:
                    self._waker.drain()
        for sock in (*self._guests, self._listener):
            sock.close()
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

    def _receive(self, guest: socket.socket) -> None:
        data = _received(guest)
        if BEAT_BYTE in data:
            with contextlib.suppress(OSError):  # a guest that reads nothing needs no more answers
                guest.send(ANSWER_BYTE)
        elif not data:
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


def _received(sock: socket.socket) -> bytes:
    """What the guest has sent; nothing if it has ended the connection."""
    try:
        return sock.recv(256)
    except BlockingIOError:
        return b" "
    except OSError:
        return b""


# --- peer monitor

log = logging.getLogger(__name__)

NEIGHBOURS = 2
SMALL = 16
DETECTED = 5.0  # seconds at most: two beats, QUIET, ATTEMPTS and their rest
REFUSALS = 3  # by a port that was never open to this agent; then the peer is reported as unreached
SOON = 0.005  # seconds after the first inconclusive attempt in a row
PAUSE = 0.3  # seconds after a later one, at most
TELL_AGAIN = 0.2  # seconds between attempts to deliver a report: all members wait for it
LOOK_AGAIN = 1.0  # seconds between attempts to reach an unreached peer
PATIENCE = 5.0  # seconds for each of these attempts, and for repeating a report
MOST_FOLLOWED = 64
FIRST_PROBATION = 2.0
MOST_PROBATION = 300.0

Key = tuple[str, str, int]


class PeerObserver(Protocol):
    """Receives the peer monitor's findings, in the threads of the connections."""

    def lost(self, agent: str, why: str) -> bool:
        """The agent's process is gone. True if all know it, or never will; False makes the caller repeat it."""

    def unreached(self, agent: str) -> int:
        """The agent is not reached. Returns how often these two have lost each other; 0 if the report failed."""

    def reached(self, agent: str) -> bool:
        """The agent is reached again after `unreached`. True if all know it, or never will."""


def probation(times: int) -> float:
    """How many seconds a connection must hold after it has failed `times` times."""
    return min(MOST_PROBATION, FIRST_PROBATION * 4.0 ** min(max(0, times - 1), 8))


def pause(times: int) -> float:
    """Seconds to wait after `times` inconclusive attempts in a row.

    The first attempt follows the end of a connection, most often because the process dies. Its kernel closes one
    descriptor after the other, and may accept a connection that it resets a moment later.
    """
    return min(PAUSE, SOON * 2.0 ** min(max(0, times - 1), 8))


def key_of(member: Member) -> Key:
    return member.agent, member.address, member.link_port


class PeerMonitor:
    """The listening end, a thread for each neighbour in the present round, and one that probes all others in turn.

    They stay until the next round is formed, so a death while the others join is found as fast.
    """

    def __init__(self, agent: str, host: str = "") -> None:
        self._listening = Listener(agent, host)
        self.port = self._listening.port
        self._lock = threading.Lock()
        self._followed: dict[Key, _Follower] = {}
        self._far_probe: FarProbe | None = None

    def follow(self, formed: Round, observer: PeerObserver, lease: float) -> None:
        """Connect to the neighbours in this round, and drop all other connections but those to unreached peers.
        `lease`: seconds without an answer after which a peer's process counts as gone."""
        near, far = _around(formed)
        with self._lock:
            if self._far_probe is not None:
                self._far_probe.stop()
            for key, follower in list(self._followed.items()):
                follower.stays = key in near
                if follower.over or not (follower.stays or follower.unreached):
                    self._followed.pop(key).stop()
            for key in set(near) - set(self._followed):
                self._followed[key] = _Follower(near[key], observer, lease)
            self._far_probe = FarProbe(far, lambda member: self._suspect(member, observer, lease)) if far else None

    def close(self) -> None:
        """End all connections and threads."""
        self._listening.close()
        with self._lock:
            if self._far_probe is not None:
                self._far_probe.stop()
            for follower in self._followed.values():
                follower.stop()
            self._followed.clear()

    def _suspect(self, member: Member, observer: PeerObserver, lease: float) -> None:
        """Follow a far member that does not answer, with a thread of its own."""
        with self._lock:
            self._followed = {key: follower for key, follower in self._followed.items() if not follower.over}
            if key_of(member) not in self._followed and len(self._followed) < MOST_FOLLOWED:
                self._followed[key_of(member)] = _Follower(member, observer, lease, stays=False)


def _around(formed: Round) -> tuple[dict[Key, Member], list[Member]]:
    """The neighbours, and the far members that this member probes. In each pair, one probes the other."""
    size = formed.world_size
    behind = [formed.members[(formed.rank + step) % size] for step in range(1, size)]
    half = size // 2
    count = max(NEIGHBOURS, half) if size <= SMALL else NEIGHBOURS
    near, far = behind[:count], behind[count:half]
    return {key_of(m): m for m in near if m.link_port}, [m for m in far if m.link_port]


class _Follower:
    """The connection to one member, in a thread of its own. The thread ends when the member is gone, and if `stays` is
    false, also when it is reached."""

    def __init__(
        self,
        member: Member,
        observer: PeerObserver,
        lease: float,
        *,
        stays: bool = True,
        stopped: threading.Event | None = None,
    ) -> None:
        self._member, self._observer, self._lease = member, observer, lease
        self.stays, self.unreached, self.over = stays, False, False
        self._connected, self._refusals = False, 0
        self._unclear = 0  # inconclusive attempts in a row
        self._times = 0  # how often the two have lost each other; 0: not reported yet
        self._rest = MOST_REST
        self._stopped = stopped or threading.Event()
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
        try:
            while not self._stopped.is_set() and self._try():
                pass
        finally:
            self.over = True

    def _try(self) -> bool:
        """Make one attempt and act on its result; whether to go on."""
        once = self.unreached
        result = probe(
            self._member, self._stopped.is_set, attempts=1 if once else ATTEMPTS,
            rest=PATIENCE if once else self._rest,
        )  # fmt: skip
        match result:
            case Reached(connection):
                self._connected, self._refusals, began = True, 0, time.monotonic()
                if self._hold(connection):
                    return self._report_lost(f"its kernel answers, and its process has not for {self._lease:g} s")
                if time.monotonic() - began >= PAUSE:
                    self._unclear = 0
                else:
                    self._rest_after_nothing()
                return self.stays or self.unreached
            case Gone(why):
                if self._stopped.is_set():
                    return False
                if self._connected:
                    return self._report_lost(why)
                self._refusals += 1
                if self._refusals >= REFUSALS:
                    self._not_reached(why)
                self._stopped.wait(LOOK_AGAIN if self.unreached else PAUSE)
            case Silent(why):
                if not self._stopped.is_set():
                    self._not_reached(why)
                    self._stopped.wait(LOOK_AGAIN)
            case Unclear():
                self._rest_after_nothing()
            case _:
                assert_never(result)
        return True

    def _rest_after_nothing(self) -> None:
        self._unclear += 1
        self._stopped.wait(LOOK_AGAIN if self.unreached else pause(self._unclear))

    def _not_reached(self, why: str) -> None:
        if not self.unreached:
            log.warning("%s", why)
            self.unreached, self._times = True, 0
        # The round ends with this report. A store that has no leader yet may answer any moment, so the report is
        # repeated before the next attempt to connect.
        until = time.monotonic() + PATIENCE
        while not self._times:
            self._times = self._observer.unreached(self._member.agent)
            if self._times or time.monotonic() >= until or self._stopped.wait(TELL_AGAIN):
                break

    def _report_lost(self, why: str) -> bool:
        """Report it until all know. False: there is nothing left to follow."""
        while not self._observer.lost(self._member.agent, why) and not self._stopped.wait(TELL_AGAIN):
            pass
        return False

    def _hold(self, sock: socket.socket) -> bool:
        """Beat over the connection until it ends, nothing comes through it, or this follower is stopped. Whether it
        ended because the peer's process stands still."""
        with self._lock:
            self._sock = sock
        # `stop` shuts `_sock` down. If it came before `_sock` was set, the condition below ends the loop.
        began = time.monotonic()
        standstill = Standstill(self._member, self._lease, began)
        try:
            with sock, contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return self._beat(sock, began, standstill)
        finally:
            standstill.close()
            with self._lock:
                self._sock = None
        return False

    def _beat(self, sock: socket.socket, began: float, standstill: Standstill) -> bool:
        pulse, now = Pulse(sock, began), began
        while not self._stopped.is_set() and pulse.beat(now) and self._well(now - began):
            self._rest = rest(pulse.round_trip)
            due = now + (LOOK_CLOSER if pulse.waits else BEAT)
            while (now := time.monotonic()) < due:  # an answer is no reason to beat sooner
                sock.settimeout(max(1e-3, due - now))
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(256):
                        return False
                    standstill.clear()
            if standstill.look(now, pulse.round_trip):
                return True
        return False

    def _well(self, seconds: float) -> bool:
        """Whether the connection, which has held for `seconds`, is still needed. Ends the report after probation."""
        if self.unreached and seconds >= probation(self._times):
            self.unreached = not self._observer.reached(self._member.agent)
        return self.stays or self.unreached
