"""Connections: how many a stranger may open, and how fast one is heard who is refused again and again.

A refused request costs the event loop some tenths of a millisecond, whatever it says; a thousand of them at once are
ahead of every worker. So an address that was refused too often is heard `RATE` times a second: the connection that was
refused, and each new one of that address, is not read before its turn, and closed if that were later than `LONGEST`.
A request on a connection where nobody was admitted yet is paid for before it is read, and paid back if it is right.
Knows no HTTP. Invariants: an address in debt has its turns one after the other, never many at once; a connection on
which somebody was admitted counts no longer as a stranger's; this machine itself is not slowed down.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from collections import OrderedDict
from collections.abc import Callable

from everstep_operator.endpoint.tenant_limits import Shares, Tenant
from everstep_operator.runtime.fair_queueing import Queue, Turns

RATE, BURST = 20.0, 100.0  # of one address, what is refused or not known yet: a second, and at once
LONGEST = 5.0  # seconds
IDLE = 15.0  # seconds in which something has to come
STRANGERS = 4096  # connections on which nobody was admitted yet; of one address a fifth
MAX_ADDRESSES = 10_000
SPARE = 256  # file descriptors for all else
# Local mode, and whoever is in the operator's own pod.
HERE = frozenset({"127.0.0.1", "::1", ""})


class Doors:
    """Of one server. `connection()` makes what serves one; `enter` gives each its door."""

    def __init__(self, connection: Callable[[], asyncio.BaseProtocol]) -> None:
        self._connection = connection
        self.turns = Turns(lambda go: asyncio.get_running_loop().call_soon(go))
        self._strangers = Shares(STRANGERS)
        self._debts: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and when that was
        self.open = 0
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = sys.maxsize if files == resource.RLIM_INFINITY else max(SPARE, files - SPARE)

    def enter(self, address: str) -> Door | None:
        """The door of one more connection of that address; None if it is not served."""
        if not self.is_heard(address, _now()) or self.open >= self._most:
            return None
        if address not in HERE and not self._strangers.take(_guest(address)):
            return None
        self.open += 1
        return Door(self, self._connection, address)

    def leave(self, address: str, stranger: bool) -> None:
        self.open -= 1
        if stranger:
            self.admit(address)

    def admit(self, address: str) -> None:
        if address not in HERE:
            self._strangers.give_back(_guest(address))

    def turn(self, address: str, now: float) -> float | None:
        """Pay for a request. Seconds until it is heard; None: the address has too much debt already."""
        if address in HERE:
            return 0.0
        left = self._left(address, now)
        wait = max(0.0, (1 - left) / RATE)
        if wait > LONGEST:
            return None
        self._debts[address] = (left - 1, now)
        self._debts.move_to_end(address)
        while len(self._debts) > MAX_ADDRESSES:
            self._debts.popitem(last=False)
        return wait

    def refund(self, address: str, now: float) -> None:
        """What was paid for was right to come."""
        if address in self._debts:
            self._debts[address] = (self._left(address, now) + 1, now)

    def is_heard(self, address: str, now: float) -> bool:
        """Whether a request would have its turn before long."""
        return address in HERE or (1 - self._left(address, now)) / RATE <= LONGEST

    def _left(self, address: str, now: float) -> float:
        left, at = self._debts.get(address, (BURST, now))
        return min(BURST, left + (now - at) * RATE)


class Door(asyncio.Protocol):
    """One connection, between the transport and what serves it. Whoever has one has to `leave`, once."""

    def __init__(self, doors: Doors, connection: Callable[[], asyncio.BaseProtocol], address: str) -> None:
        self._doors, self._make, self._address = doors, connection, address
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None  # None too when nothing more is heard
        self._entered = self._stranger = True
        self._paid = False
        self._whole: asyncio.Transport | None = None  # until the connection is over
        self._timer: asyncio.TimerHandle | None = None  # until it is heard, or closed because nothing came
        self._held = False  # until it is heard
        self._queue = Queue(address)
        self._queued = False  # until it has its turn
        self._waiting: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        # What serves it is made when something comes: until then it costs a socket.
        self._transport = self._whole = transport
        self._timer = asyncio.get_running_loop().call_later(IDLE, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._stranger and not self._paid and not self._held:
            self._paid = True
            self._hear(self._doors.turn(self._address, _now()))
        if self._transport is None:
            return
        if not self._held and not self._queued:
            if self._doors.turns.ask(self._queue, self._turn):
                self._hand_on(data)
                return
            self._queued = True
        self._waiting.append(data)
        self._pause()

    def _turn(self) -> None:
        self._queued = False
        if not self._held:
            self._go_on()

    def _hand_on(self, data: bytes) -> None:
        if self._inner is None:
            self._serve()
        assert self._inner is not None
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.leave()
        self._waiting.clear()
        if self._whole is not None:
            # asyncio's transport keeps a bound method of itself. Without this cycle a connection is freed when it ends;
            # with it the garbage collector frees thousands at once, and the event loop stands still for 30 ms.
            vars(self._whole).pop("_read_ready_cb", None)
        self._transport = self._whole = None
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def leave(self) -> None:
        """It is over, or was never begun."""
        if self._entered:
            self._entered = False
            self._doors.leave(self._address, self._stranger)

    def admitted(self, queue: Queue) -> None:
        """Somebody has proven who they are: their requests wait with those of their own."""
        self._queue = queue
        if self._stranger:
            self._stranger = False
            self._doors.admit(self._address)
            self._doors.refund(self._address, _now())

    def welcomed(self) -> None:
        """What came was right to come, as far as is known: a follower sends everybody on."""
        if self._stranger and self._paid:
            self._paid = False
            self._doors.refund(self._address, _now())

    def refused(self) -> None:
        """What came is answered with a refusal."""
        if not self._stranger:
            self._hear(self._doors.turn(self._address, _now()))
        elif self._paid:
            self._paid = False  # the next one pays
        elif self._transport is not None and self._address not in HERE:
            self._transport.abort()  # requests in one piece, of which only the first was paid for

    def _hear(self, wait: float | None) -> None:
        if self._transport is None or self._held:
            return
        if wait is None:
            self._transport.close()
            self._transport = None
        elif wait:
            self._held = True
            self._set_timer(wait)
            self._pause()
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._release)

    def _pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def _serve(self) -> None:
        assert self._transport is not None
        inner = self._make()
        assert isinstance(inner, asyncio.Protocol)
        self._inner = inner
        inner.connection_made(self._transport)

    def _release(self) -> None:
        self._timer, self._held = None, False
        if self._waiting and not self._queued:
            self._queued = not self._doors.turns.ask(self._queue, self._turn)
        if not self._queued:
            self._go_on()

    def _go_on(self) -> None:
        """Hand on what has come, and hear more."""
        if self._transport is None or self._transport.is_closing():
            return
        with contextlib.suppress(RuntimeError):  # it began to close in between
            self._transport.resume_reading()
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self._hand_on(data)


def door_of(transport: asyncio.BaseTransport | None) -> Door | None:
    """The one that a request came through, while its connection is open."""
    door = transport.get_protocol() if isinstance(transport, asyncio.Transport) else None
    return door if isinstance(door, Door) else None


def _guest(address: str) -> Tenant:
    return Tenant(address, address, address)


def _now() -> float:
    return asyncio.get_running_loop().time()
