"""Bounds what the connections of one listener may hold: time, number, and bytes.

Anybody who reaches the port can open connections, so a connection is judged by what its sender has done on it. Until a
sender is admitted (`auth` knows the sender), a connection lives `head_seconds` for a whole head, however many bytes
arrive, and the oldest waiting one is closed for a new one. So slow senders lose only their own connections. An admitted
one may be idle for longer, but a pod has few idle ones, and beyond a bound of all an idle one of the namespace with
most of them is closed. A connection is read in small pieces, each in a fair turn (`fair_queueing`), and no further than
what its request has declared. This module knows nothing of HTTP: its user reports when a request begins and ends.
Invariants: a connection that waits has a timer; each bound is kept by ending the oldest connection, never by refusing
the newest while another could be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from everstep_operator.endpoint.tenant_limits import Tenant
from everstep_operator.runtime.fair_queueing import FairQueue, Flow

PIECE = 16 * 1024  # bytes read at once: what costs most to parse (chunks of one byte) takes 3 ms then
MAX_HEAD = 64 * 1024  # bytes before a request begins, and beyond what it has declared
RESERVED_FILES = 256  # file descriptors that connections leave to the rest of the process


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """Times in seconds."""

    head_seconds: float = 10.0  # for the whole head of a request, on a connection where nobody was admitted yet
    idle_seconds: float = 75.0  # for the next one, on a connection of an admitted sender
    answer_seconds: float = 10.0  # for an answer to be taken
    refused_seconds: float = 1.0  # not read, after a request that was refused by its sender's fault
    strangers: int = 2048  # connections that wait for a head, and on which nobody was admitted
    idle_of_pod: int = 16  # idle ones; an agent has 4 at most
    idle: int = 16_384  # of all pods: the largest job has 4,096 agents
    total: int | None = None  # of all kinds; None: what the process may open


class Connections:
    """The connections of one listener. `accept` is the factory of their protocols."""

    def __init__(self, protocol: Callable[[], asyncio.BaseProtocol], bounds: ConnectionBounds | None = None) -> None:
        self.make, self.bounds = protocol, bounds or ConnectionBounds()
        self.queue = FairQueue(lambda start: asyncio.get_running_loop().call_soon(start))
        # Of whichever is read now: its bytes are copied at once. asyncio's TLS fills it in several reads, each into a
        # slice of it, so it is a view: the slice of a bytearray would be a copy, and what was read would be lost.
        self.buffer = memoryview(bytearray(PIECE))
        self._all: set[Connection] = set()
        self._strangers: OrderedDict[Connection, None] = OrderedDict()  # those that wait, the oldest first
        self._idle: OrderedDict[Connection, Tenant] = OrderedDict()
        self._idle_of_pod: dict[str, OrderedDict[Connection, None]] = {}
        self._idle_of_namespace: dict[str, OrderedDict[Connection, None]] = {}
        self._max = _openable() if self.bounds.total is None else self.bounds.total

    def accept(self) -> Connection:
        return Connection(self)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def idle(self) -> int:
        """How many admitted connections are idle."""
        return len(self._idle)

    def close(self) -> None:
        """End all of them."""
        for connection in tuple(self._all):
            connection.end()

    # --- what a connection says of itself

    def opened(self, connection: Connection) -> None:
        if len(self._all) >= self._max and not self._make_room():
            connection.end()
            return
        self._all.add(connection)
        self.waits(connection, None)

    def waits(self, connection: Connection, tenant: Tenant | None) -> None:
        """It waits for a request; `tenant`: who was admitted on it."""
        self.works(connection)
        if tenant is None:
            self._strangers[connection] = None
            if len(self._strangers) > self.bounds.strangers:
                next(iter(self._strangers)).end()
            return
        self._idle[connection] = tenant
        for of, name in ((self._idle_of_pod, tenant.pod), (self._idle_of_namespace, tenant.namespace)):
            of.setdefault(name, OrderedDict())[connection] = None
        if len(own := self._idle_of_pod[tenant.pod]) > self.bounds.idle_of_pod:
            next(iter(own)).end()
        elif len(self._idle) > self.bounds.idle:
            self._end_idle()

    def works(self, connection: Connection) -> None:
        """A request of it is handled."""
        self._strangers.pop(connection, None)
        if (tenant := self._idle.pop(connection, None)) is None:
            return
        for of, name in ((self._idle_of_pod, tenant.pod), (self._idle_of_namespace, tenant.namespace)):
            del of[name][connection]
            if not of[name]:
                del of[name]

    def ended(self, connection: Connection) -> None:
        self.works(connection)
        self._all.discard(connection)

    def _make_room(self) -> bool:
        """End one connection on which nothing is in progress, if there is one."""
        if self._strangers:
            next(iter(self._strangers)).end()
            return True
        return self._end_idle()

    def _end_idle(self) -> bool:
        """End the oldest idle one of the namespace that has most."""
        most = max(self._idle_of_namespace.values(), key=len, default=None)
        if most is None:
            return False
        next(iter(most)).end()
        return True


class Connection(asyncio.BufferedProtocol):
    """One connection, between the transport and the protocol that serves it."""

    def __init__(self, all_: Connections) -> None:
        self._all = all_
        self._transport: asyncio.Transport | None = None  # None: nothing more is read
        self._inner: asyncio.Protocol | None = None  # made when data comes; until then it costs only a socket
        self._timer: asyncio.TimerHandle | None = None
        self._tenant: Tenant | None = None
        self._flow = Flow("")
        self._bytes_left = MAX_HEAD  # bytes that may still come
        self._pending_data: bytes | None = None  # waits for its turn
        self._paused = self._discards = False

    # --- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # All strangers are one group, however many addresses they have; in it the addresses take turns.
        address = transport.get_extra_info("peername")
        self._flow = Flow("", str(address[0]) if isinstance(address, tuple) else "")
        self._set_timer(self._all.bounds.head_seconds, self.end)
        self._all.opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._all.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._transport is None:
            return
        self._bytes_left -= nbytes
        if self._bytes_left < 0:
            self.end()
            return
        data = bytes(self._all.buffer[:nbytes])
        # Bytes that are only dropped wait for a turn too: otherwise a flood of large refused bodies would fill the
        # loop.
        if not self._paused and self._all.queue.try_start(self._flow, self._go_on):
            if not self._discards:
                self._hand_on(data)
            return
        self._pending_data = data
        self._transport.pause_reading()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.connection_lost(exc)

    # --- the user's side

    def request_began(self, length: int) -> bool:
        """A whole head has come; a body of `length` bytes may follow. False: it came together with one that was refused
        by its sender's fault, and the connection is closed."""
        if self._paused or self._transport is None:
            self.end()
            return False
        self._bytes_left = length + MAX_HEAD
        self._all.works(self)
        self._set_timer(None)
        return True

    def admit(self, tenant: Tenant) -> None:
        """The request's sender is known: its requests wait with those of its pod."""
        self._tenant, self._flow = tenant, Flow(tenant.namespace, tenant.pod)

    def request_ended(self, *, at_fault: bool = False, whole: bool = True) -> None:
        """It has its answer, which may still be written. `at_fault`: it was refused by its sender's fault; `whole`: its
        body was read, else the rest of it is of no use."""
        if self._transport is None:
            return
        self._bytes_left = max(self._bytes_left, MAX_HEAD)
        self._discards = self._discards or not whole
        bounds = self._all.bounds
        self._all.waits(self, self._tenant)
        if at_fault:
            self._paused = True
            self._set_timer(bounds.refused_seconds, self._read_on)
        elif self._transport is not None:
            self._set_timer(bounds.answer_seconds, self._check_answer_sent)

    def end(self) -> None:
        """Close it now, whatever is in progress."""
        transport = self._transport
        self._forget()
        if transport is not None:
            transport.abort()

    # ---

    def _forget(self) -> None:
        if self._transport is not None:
            _break_cycle(self._transport)
        self._transport, self._pending_data = None, None
        self._set_timer(None)
        self._all.ended(self)

    def _set_timer(self, seconds: float | None, then: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None and then is not None and self._transport is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, then)

    def _check_answer_sent(self) -> None:
        """Close the connection if its answer was not received in time; else wait for the next request."""
        if self._transport is None or self._transport.get_write_buffer_size():
            self.end()
            return
        bounds = self._all.bounds
        whole = bounds.head_seconds if self._tenant is None else bounds.idle_seconds
        self._set_timer(max(0.0, whole - bounds.answer_seconds), self.end)

    def _read_on(self) -> None:
        self._paused = False
        self._set_timer(self._all.bounds.answer_seconds, self._check_answer_sent)
        if self._pending_data is not None and self._all.queue.try_start(self._flow, self._go_on):
            self._go_on()

    def _go_on(self) -> None:
        """Pass the piece that waited on, and read more."""
        if self._transport is None or self._transport.is_closing() or self._paused:
            return
        with contextlib.suppress(RuntimeError):  # it began to close in between
            self._transport.resume_reading()
        pending, self._pending_data = self._pending_data, None
        if pending is not None and not self._discards:
            self._hand_on(pending)

    def _hand_on(self, data: bytes) -> None:
        if self._inner is None:
            made = self._all.make()
            assert isinstance(made, asyncio.Protocol)
            assert self._transport is not None
            self._inner = made
            made.connection_made(self._transport)
        self._inner.data_received(data)


def _break_cycle(transport: Any) -> None:
    """A transport that is closed for good refers to itself by the method that it read with. Without that it is freed at
    once, and needs no garbage collection, which would visit all other connections (`garbage_collection`). Where a
    version of asyncio has another name for it, this has no effect."""
    transport._read_ready_cb = None


def _openable() -> int:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if files == resource.RLIM_INFINITY else max(RESERVED_FILES, files - RESERVED_FILES)


def connection_of(transport: asyncio.BaseTransport | None) -> Connection | None:
    """The connection of a request, while it is open."""
    protocol = transport.get_protocol() if isinstance(transport, asyncio.Transport) else None
    return protocol if isinstance(protocol, Connection) else None
