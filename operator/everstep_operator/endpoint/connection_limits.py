"""Limits the connections of unauthenticated senders, and the rate of requests from an address that was refused.

A refused request costs the event loop some tenths of a millisecond, whatever its content. A thousand of them at once
would delay every worker. So an address that was refused too often is read only `REFUSED_RATE` times a second: its
refused connection, and each new one, is not read before its turn. It is closed if the turn would come later than
`MAX_DELAY`. A request on a connection that is not authenticated yet is charged before it is read, and the charge is
returned if the request was legitimate.
This module knows nothing of HTTP. Invariants: the requests of an address in debt are read one after the other, never
many at once; an authenticated connection no longer counts against its address; loopback addresses are not limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from collections import OrderedDict
from collections.abc import Callable

from everstep_operator.endpoint.tenant_limits import Shares, Tenant
from everstep_operator.runtime.fair_queueing import FairQueue, Flow

# Refused or unauthenticated requests of one address: per second, and at once.
REFUSED_RATE, REFUSED_BURST = 20.0, 100.0
MAX_DELAY = 5.0  # seconds
IDLE_SECONDS = 15.0  # an unauthenticated connection is closed if nothing was sent in this time
MAX_UNAUTHENTICATED = 4096  # connections; one address has a fifth of them at most
MAX_ADDRESSES = 10_000
RESERVED_FILES = 256  # file descriptors that connections leave to the rest of the process
# Local mode, and processes in the operator's own pod.
LOOPBACK = frozenset({"127.0.0.1", "::1", ""})


class ConnectionLimits:
    """The limits of one server. `protocol()` makes the protocol that serves one connection."""

    def __init__(self, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        self._protocol = protocol
        self.queue = FairQueue(lambda start: asyncio.get_running_loop().call_soon(start))
        self._unauthenticated = Shares(MAX_UNAUTHENTICATED)
        self._balances: OrderedDict[str, tuple[float, float]] = OrderedDict()  # the balance, and its time
        self.open = 0
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_open = sys.maxsize if files == resource.RLIM_INFINITY else max(RESERVED_FILES, files - RESERVED_FILES)

    def connect(self, address: str) -> Connection | None:
        """Accept one more connection of that address; None if it is refused."""
        if not self.is_served(address, _now()) or self.open >= self._max_open:
            return None
        if address not in LOOPBACK and not self._unauthenticated.take(_as_tenant(address)):
            return None
        self.open += 1
        return Connection(self, self._protocol, address)

    def disconnect(self, address: str, authenticated: bool) -> None:
        self.open -= 1
        if not authenticated:
            self.authenticate(address)

    def authenticate(self, address: str) -> None:
        """One connection of the address no longer counts as unauthenticated."""
        if address not in LOOPBACK:
            self._unauthenticated.give_back(_as_tenant(address))

    def charge(self, address: str, now: float) -> float | None:
        """Charge one request. Seconds until it may be read; None if the address is too far in debt already."""
        if address in LOOPBACK:
            return 0.0
        left = self._left(address, now)
        wait = max(0.0, (1 - left) / REFUSED_RATE)
        if wait > MAX_DELAY:
            return None
        self._balances[address] = (left - 1, now)
        self._balances.move_to_end(address)
        while len(self._balances) > MAX_ADDRESSES:
            self._balances.popitem(last=False)
        return wait

    def refund(self, address: str, now: float) -> None:
        """Return the charge for a request that was legitimate."""
        if address in self._balances:
            self._balances[address] = (self._left(address, now) + 1, now)

    def is_served(self, address: str, now: float) -> bool:
        """Whether a request of this address would be read within `MAX_DELAY`."""
        return address in LOOPBACK or (1 - self._left(address, now)) / REFUSED_RATE <= MAX_DELAY

    def _left(self, address: str, now: float) -> float:
        left, at = self._balances.get(address, (REFUSED_BURST, now))
        return min(REFUSED_BURST, left + (now - at) * REFUSED_RATE)


class Connection(asyncio.Protocol):
    """One connection, between the transport and the protocol that serves it. Call `release` once it is over."""

    def __init__(self, limits: ConnectionLimits, protocol: Callable[[], asyncio.BaseProtocol], address: str) -> None:
        self._limits, self._make, self._address = limits, protocol, address
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None  # also None when nothing more is read
        self._counted = True
        self._authenticated = False
        self._charged = False
        self._whole: asyncio.Transport | None = None  # until the connection is over
        self._timer: asyncio.TimerHandle | None = None  # runs until it is read, or closed because nothing was sent
        self._delayed = False  # true until the address has paid its debt
        self._flow = Flow(address)
        self._queued = False  # true until the fair queue starts it
        self._waiting: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        # The protocol is made when data comes; until then the connection costs only a socket.
        self._transport = self._whole = transport
        self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        if not self._authenticated and not self._charged and not self._delayed:
            self._charged = True
            self._delay(self._limits.charge(self._address, _now()))
        if self._transport is None:
            return
        if not self._delayed and not self._queued:
            if self._limits.queue.ask(self._flow, self._start):
                self._hand_on(data)
                return
            self._queued = True
        self._waiting.append(data)
        self._pause()

    def _start(self) -> None:
        self._queued = False
        if not self._delayed:
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
        self.release()
        self._waiting.clear()
        if self._whole is not None:
            # asyncio's transport keeps a bound method of itself. Without this cycle a connection is freed when it ends;
            # with it the garbage collector frees thousands at once, and the event loop stands still for 30 ms.
            vars(self._whole).pop("_read_ready_cb", None)
        self._transport = self._whole = None
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def release(self) -> None:
        """The connection is over, or never began, and no longer counts."""
        if self._counted:
            self._counted = False
            self._limits.disconnect(self._address, self._authenticated)

    def authenticate(self, flow: Flow) -> None:
        """The sender has proven its identity: its requests wait with those of its own flow."""
        self._flow = flow
        if not self._authenticated:
            self._authenticated = True
            self._limits.authenticate(self._address)
            self._limits.refund(self._address, _now())

    def request_was_legitimate(self) -> None:
        """The request was legitimate, as far as is known: a follower redirects every request."""
        if not self._authenticated and self._charged:
            self._charged = False
            self._limits.refund(self._address, _now())

    def request_was_refused(self) -> None:
        """The request was refused by its sender's fault."""
        if self._authenticated:
            self._delay(self._limits.charge(self._address, _now()))
        elif self._charged:
            self._charged = False  # the next one is charged
        elif self._transport is not None and self._address not in LOOPBACK:
            self._transport.abort()  # several requests came together, and only the first was charged

    def _delay(self, wait: float | None) -> None:
        if self._transport is None or self._delayed:
            return
        if wait is None:
            self._transport.close()
            self._transport = None
        elif wait:
            self._delayed = True
            self._set_timer(wait)
            self._pause()
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._end_delay)

    def _pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def _serve(self) -> None:
        assert self._transport is not None
        inner = self._make()
        assert isinstance(inner, asyncio.Protocol)
        self._inner = inner
        inner.connection_made(self._transport)

    def _end_delay(self) -> None:
        self._timer, self._delayed = None, False
        if self._waiting and not self._queued:
            self._queued = not self._limits.queue.ask(self._flow, self._start)
        if not self._queued:
            self._go_on()

    def _go_on(self) -> None:
        """Pass the received data on, and read more."""
        if self._transport is None or self._transport.is_closing():
            return
        with contextlib.suppress(RuntimeError):  # it began to close in between
            self._transport.resume_reading()
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self._hand_on(data)


def connection_of(transport: asyncio.BaseTransport | None) -> Connection | None:
    """The connection of a request, while it is open."""
    found = transport.get_protocol() if isinstance(transport, asyncio.Transport) else None
    return found if isinstance(found, Connection) else None


def _as_tenant(address: str) -> Tenant:
    return Tenant(address, address, address)


def _now() -> float:
    return asyncio.get_running_loop().time()
