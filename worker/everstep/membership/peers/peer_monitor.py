"""Connections between agents, by which the death of one, or of the network between two, is known early.

Each member of a round connects to the next two in rank order (in a ring); of up to `SMALL` members each pair has a
connection. When a process dies, its kernel ends the connection: in milliseconds. When packets are lost, one way or
both, what is sent is not acknowledged. Then attempts to connect again decide (`probe`). Refused, or answered by
another agent: the process is gone. No packet came back: these two do not reach each other, within `DETECTED` seconds.
In a larger world, pairs that are further apart are tried in turn, one at a time, so that what an agent sends does not
grow with the world. Who was never reached is not called gone, because a firewall refuses too. Knows neither store nor
document. A stopped process keeps its connections: it is the lease's.

Invariants: who said that two do not reach each other looks again until they do, whatever round it is in, and says so
when they did for as long as `probation` asks. Who found another gone says so until that was told to all; who found one
silent says so for `PATIENCE` seconds, and then looks again.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Protocol, assert_never

from everstep.contract.document import Member
from everstep.membership.peers.far_probe import FarProbe
from everstep.membership.peers.listener import Listener
from everstep.membership.peers.probe import ATTEMPTS, MOST_REST, Gone, Pulse, Reached, Silent, Unclear, probe, rest
from everstep.membership.world_state import Round

log = logging.getLogger(__name__)

NEIGHBOURS = 2
SMALL = 16
BEAT = 0.5  # seconds between two bytes over a connection
LOOK_CLOSER = 0.05  # seconds between looks at one that is not acknowledged
DETECTED = 5.0  # seconds at most: two beats, QUIET, ATTEMPTS and their rest
REFUSALS = 3  # by a port that was never open to this agent
SOON = 0.005  # seconds after the first attempt in a row that showed nothing
PAUSE = 0.3  # seconds after a later one, at most
TELL_AGAIN = 0.2  # seconds until what could not be told is told again: all wait for that
LOOK_AGAIN = 1.0  # seconds between attempts, where none came through
PATIENCE = 5.0  # seconds for each of these, and for which what one found is told
MOST_FOLLOWED = 64
FIRST_PROBATION = 2.0
MOST_PROBATION = 300.0

Key = tuple[str, str, int]


class PeerObserver(Protocol):
    """Is told what the connections show. Called from their threads."""

    def lost(self, agent: str, why: str) -> bool:
        """The agent's process is gone. Whether all know it, or never will; else it is said again."""
        ...

    def unreached(self, agent: str) -> int:
        """The agent is not reached. How often these two have lost each other; 0 if that could not be told to all."""
        ...

    def reached(self, agent: str) -> bool:
        """The agent is reached again, after that. Whether all know it, or never will."""
        ...


def probation(times: int) -> float:
    """Seconds for which a connection must hold that failed so often."""
    return min(MOST_PROBATION, FIRST_PROBATION * 4.0 ** min(max(0, times - 1), 8))


def pause(times: int) -> float:
    """Seconds after so many attempts in a row that showed nothing.

    The first one comes at the end of a connection, most often of a process that dies: its kernel closes one descriptor
    after the other, and still takes a connection that it resets a moment later.
    """
    return min(PAUSE, SOON * 2.0 ** min(max(0, times - 1), 8))


def key_of(member: Member) -> Key:
    return member.agent, member.address, member.link_port


class PeerMonitor:
    """The listening end, a thread for each neighbour in the present round, and one for all others in turn.

    They outlive the round until the next one is formed: who dies while the others join is known as fast.
    """

    def __init__(self, agent: str, host: str = "") -> None:
        self._listening = Listener(agent, host)
        self.port = self._listening.port
        self._lock = threading.Lock()
        self._followed: dict[Key, _Follower] = {}
        self._far_probe: FarProbe | None = None

    def follow(self, formed: Round, observer: PeerObserver) -> None:
        """Connect to the neighbours in this round; to no others any more but those that were not reached."""
        near, far = _around(formed)
        with self._lock:
            if self._far_probe is not None:
                self._far_probe.stop()
            for key, follower in list(self._followed.items()):
                follower.stays = key in near
                if follower.over or not (follower.stays or follower.unreached):
                    self._followed.pop(key).stop()
            for key in set(near) - set(self._followed):
                self._followed[key] = _Follower(near[key], observer)
            self._far_probe = FarProbe(far, lambda member: self._suspect(member, observer)) if far else None

    def close(self) -> None:
        """End all connections and threads."""
        self._listening.close()
        with self._lock:
            if self._far_probe is not None:
                self._far_probe.stop()
            for follower in self._followed.values():
                follower.stop()
            self._followed.clear()

    def _suspect(self, member: Member, observer: PeerObserver) -> None:
        """A far member does not answer: look closer."""
        with self._lock:
            self._followed = {key: one for key, one in self._followed.items() if not one.over}
            if key_of(member) not in self._followed and len(self._followed) < MOST_FOLLOWED:
                self._followed[key_of(member)] = _Follower(member, observer, stays=False)


def _around(formed: Round) -> tuple[dict[Key, Member], list[Member]]:
    """The neighbours, and the others that this member looks at: of each pair, one looks at the other."""
    size = formed.world_size
    behind = [formed.members[(formed.rank + step) % size] for step in range(1, size)]
    half = size // 2
    count = max(NEIGHBOURS, half) if size <= SMALL else NEIGHBOURS
    near, far = behind[:count], behind[count:half]
    return {key_of(m): m for m in near if m.link_port}, [m for m in far if m.link_port]


class _Follower:
    """The connection to one member, in a thread that ends when the member is gone; or reached, if it is not to stay."""

    def __init__(
        self, member: Member, observer: PeerObserver, *, stays: bool = True, stopped: threading.Event | None = None
    ) -> None:
        self._member, self._observer = member, observer
        self.stays, self.unreached, self.over = stays, False, False
        self._met, self._refusals = False, 0
        self._unclear = 0  # attempts in a row that showed nothing
        self._times = 0  # that the two have lost each other; 0: nobody was told
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
        """One attempt and what follows from it; whether to go on."""
        once = self.unreached
        found = probe(
            self._member, self._stopped.is_set, attempts=1 if once else ATTEMPTS,
            rest=PATIENCE if once else self._rest,
        )  # fmt: skip
        match found:
            case Reached(connection):
                self._met, self._refusals, began = True, 0, time.monotonic()
                self._hold(connection)
                if time.monotonic() - began >= PAUSE:
                    self._unclear = 0
                else:
                    self._rest_after_nothing()
                return self.stays or self.unreached
            case Gone(why):
                if self._stopped.is_set():
                    return False
                if self._met:
                    while not self._observer.lost(self._member.agent, why) and not self._stopped.wait(TELL_AGAIN):
                        pass
                    return False
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
                assert_never(found)
        return True

    def _rest_after_nothing(self) -> None:
        self._unclear += 1
        self._stopped.wait(LOOK_AGAIN if self.unreached else pause(self._unclear))

    def _not_reached(self, why: str) -> None:
        if not self.unreached:
            log.warning("%s", why)
            self.unreached, self._times = True, 0
        # The round ends when one of the two says so: it waits for a store that has no leader yet, not for an attempt.
        until = time.monotonic() + PATIENCE
        while not self._times:
            self._times = self._observer.unreached(self._member.agent)
            if self._times or time.monotonic() >= until or self._stopped.wait(TELL_AGAIN):
                break

    def _hold(self, sock: socket.socket) -> None:
        """Until the connection ends or nothing comes through it, or this is stopped."""
        with self._lock:
            self._sock = sock
        # A stop that came before this saw no socket.
        began = time.monotonic()
        with sock, contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(BEAT)
            pulse = Pulse(sock, began)
            while not self._stopped.is_set() and pulse.beat(time.monotonic()):
                if not self._well(time.monotonic() - began):
                    break
                self._rest = rest(pulse.round_trip)
                sock.settimeout(LOOK_CLOSER if pulse.waits else BEAT)
                try:
                    if not sock.recv(256):
                        break
                except TimeoutError:
                    pass
        with self._lock:
            self._sock = None

    def _well(self, seconds: float) -> bool:
        """The connection has held for so long; whether it is needed any longer."""
        if self.unreached and seconds >= probation(self._times):
            self.unreached = not self._observer.reached(self._member.agent)
        return self.stays or self.unreached
