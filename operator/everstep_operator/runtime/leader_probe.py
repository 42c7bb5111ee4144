"""Detects that the process that holds the Lease is gone or frozen, long before the Lease expires.

A follower keeps a connection to the leader and sends it a request again and again. The leader's kernel acknowledges
that even if the process is stopped or gets no processor. If nothing is acknowledged, or the connection ends, the
follower tries to connect again. If the attempts are refused, the process is gone. If none is answered, its machine is
lost or cut off. If the kernel acknowledges and no answer comes for `UNANSWERED` seconds, the process stands still. Only
time in which this process ran counts: two replicas of one busy machine wait together, and neither accuses the other.

This module knows nothing of Leases: the elector also sees whether the leader still renews. It writes its one request
itself, because it needs options of the socket (TCP_USER_TIMEOUT) and a connection of its own, which the HTTP client of
the Kubernetes API does not give. Invariant: an address that was never reached never counts as gone, because a firewall
is silent too; and one that never answered never counts as still.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable
from enum import Enum
from typing import TypeAlias

log = logging.getLogger("everstep.leader_probe")

BEAT = 0.4  # seconds between an answer and the next request
SILENT = 1.0  # seconds within which sent data must be acknowledged
ATTEMPTS, SPACING = 8, 0.1  # attempts to connect again, and seconds between them
RECHECK = 0.5  # seconds until the address is read again, or an unreachable one is tried again
UNANSWERED = 2.5  # seconds without an answer; a process may well stand still for two
LOOK = 0.25  # seconds between checks whether the answer has come
MAX_ANSWER = 64 * 1024
_REQUEST = b"GET /healthz HTTP/1.1\r\nHost: leader\r\n\r\n"
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT * 1000)),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
)

Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Health(Enum):
    """What is known of the process at an address. `GONE`: it has ended, or its machine gives no sign. `STILL`: its
    kernel answers, and the process does not."""

    ANSWERS = "answers"
    STILL = "still"
    GONE = "gone"


class LeaderProbe:
    """`address` gives the `host:port` to probe, or None."""

    def __init__(self, address: Callable[[], str | None]) -> None:
        self._address = address
        self._reached_address: str | None = None  # was reached
        self._gone_address: str | None = None
        self._answered_address: str | None = None  # has answered
        self._still_address: str | None = None

    def health(self, address: str) -> Health:
        """Of the process that was once reached at the address."""
        if address == self._gone_address:
            return Health.GONE
        return Health.STILL if address == self._still_address else Health.ANSWERS

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            address = self._address()
            if address is None:
                await asyncio.sleep(RECHECK)
                continue
            try:
                why = await self._watch_leader(address)
            except (OSError, ValueError) as e:  # an unknown host name, or an invalid port
                why = str(e)
            if why and address == self._reached_address and address != self._gone_address:
                self._gone_address = address
                log.warning("the leader is gone", extra={"address": address, "reason": why})
            await asyncio.sleep(RECHECK if why else 0)

    async def _watch_leader(self, address: str) -> str:
        """Watch the leader until the address changes or the connection ends. Return why it cannot be reached, or
        nothing."""
        reached = await _reach(address)
        if isinstance(reached, str):
            return reached
        self._reached_address, self._gone_address = address, None
        reader, writer = reached
        try:
            while self._address() == address:
                writer.write(_REQUEST)
                await self._answered(reader, address)
                await asyncio.sleep(BEAT)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as e:
            log.debug("the connection to the leader ended: %s", e)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        return ""

    async def _answered(self, reader: asyncio.StreamReader, address: str) -> None:
        """Wait for one answer, however long, and note meanwhile that it is late."""
        answer = asyncio.ensure_future(_answer(reader))
        try:
            for looks in itertools.count(1):
                await asyncio.wait((answer,), timeout=LOOK)
                if answer.done():
                    break
                # Each look counts once, even if this process stood still between two of them.
                late = looks * LOOK >= UNANSWERED and self._answered_address == address
                if late and self._still_address != address:
                    self._still_address = address
                    log.warning("the leader stands still", extra={"address": address, "seconds": UNANSWERED})
        finally:
            answer.cancel()
        answer.result()
        self._answered_address, self._still_address = address, None


async def _answer(reader: asyncio.StreamReader) -> None:
    """Read one answer. Its content does not matter. The kernel reports a broken connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, _, length = head.partition(b"content-length:")
    size = int(length.split(b"\r\n")[0]) if length else 0
    if not 0 <= size <= MAX_ANSWER:
        raise ValueError(f"an answer of {size} bytes")
    await reader.readexactly(size)


async def _reach(address: str) -> Connection | str:
    """A connection, or why there is none. Attempts begin one after the other, and all are waited for together."""
    host, _, port = address.rpartition(":")
    trying: set[asyncio.Task[Connection]] = set()
    last = "no answer"
    try:
        for _ in range(ATTEMPTS):
            trying.add(asyncio.create_task(asyncio.open_connection(host.strip("[]"), int(port))))
            done, trying = await asyncio.wait(trying, timeout=SPACING, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    writer = task.result()[1]
                    for option in _OPTIONS:
                        writer.get_extra_info("socket").setsockopt(*option)
                    return task.result()
                if isinstance(error, ConnectionRefusedError):
                    return f"connections are refused: {error}"
                last = str(error)
                await asyncio.sleep(SPACING)
        return f"no sign of its machine: {last}"
    finally:
        for task in trying:
            task.cancel()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                (await task)[1].close()
