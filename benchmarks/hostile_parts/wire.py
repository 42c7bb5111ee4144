"""Requests as bytes on connections of our own: a load generator of a few microseconds a request."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator

from everstep.contract.messages import REPORT_PATH, Phase, Report
from everstep.contract.rounds import DOCUMENT_PATH, VERSION_HEADER

REPORT = Report(Phase.TRAIN, rank=0, world_size=2, at=1.0, step=1, metrics={"loss": 0.5}).encode()
MEGABYTE = 2**20
BAD = b"{" + b",".join(b'"k%d":0' % i for i in range(90_000)) + b"}"


def request(method: str, path: str, token: str, body: bytes = b"", length: int | None = None, extra: str = "") -> bytes:
    """`length`: what is declared, if it is not the body's."""
    size = len(body) if length is None else length
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: o\r\nAuthorization: Bearer {token}\r\n{extra}Content-Length: {size}\r\n\r\n"
    )
    return head.encode() + body


def report(token: str) -> bytes:
    return request("POST", REPORT_PATH, token, REPORT)


def read(token: str) -> bytes:
    return request("GET", DOCUMENT_PATH, token)


def half_sent(token: str) -> bytes:
    return request("PUT", DOCUMENT_PATH, token, b"{", MEGABYTE, f"{VERSION_HEADER}: 0\r\n")


def bad(token: str) -> bytes:
    return request("PUT", DOCUMENT_PATH, token, BAD, None, f"{VERSION_HEADER}: 0\r\n")


def chunks(token: str) -> bytes:
    """A body of chunks of one byte, each with an extension."""
    head = request("POST", REPORT_PATH, token).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return head + (b"1" + b";e=v" * 20 + b"\r\nx\r\n") * 1000


def slow_head(_: str) -> bytes:
    """The first byte of a request."""
    return b"P"


class Connection(asyncio.Protocol):
    """One request at a time. `on_answer(connection, status)`; status 0: it was closed without one."""

    def __init__(self, on_answer: Callable[[Connection, int], None]) -> None:
        self._on_answer = on_answer
        self._transport: asyncio.Transport | None = None
        self._waiting = False
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self._waiting = True
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        fields = head.lower()
        length = int(fields.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if len(body) >= length:
            self._buffer = b""
            self._answer(int(head[9:12]))
            if b"connection: close" in fields:
                self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._answer(0)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._waiting and not self._transport.is_closing()

    def _answer(self, status: int) -> None:
        if self._waiting:
            self._waiting = False
            self._on_answer(self, status)


class Flood:
    """`rate` requests a second, on at most `most` connections: new ones in place of those that wait longest."""

    def __init__(self, port: int, requests: Iterator[bytes], rate: float, most: int, addresses: int) -> None:
        self._port, self._requests, self._rate, self._most = port, requests, rate, most
        self._addresses = itertools.cycle([f"127.0.1.{number + 1}" for number in range(addresses)])
        self._free: deque[Connection] = deque()
        self._all: dict[Connection, None] = {}
        self.sent, self.held_back = 0, 0
        self.answers: Counter[int] = Counter()

    async def run(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (now := loop.time()) < began + seconds:
            # What could not be sent in time is not made up for.
            due = int((now - began) * self._rate) - self.sent - self.held_back
            for _ in range(min(due, 50)):
                await self._send()
            await asyncio.sleep(0.002)
        for connection in list(self._all):
            connection.close()

    async def _send(self) -> None:
        while self._free:
            connection = self._free.popleft()
            if connection.usable:
                break
            self._all.pop(connection, None)
        else:
            if len(self._all) >= self._most:  # the one that waits longest is given up
                oldest = next(iter(self._all))
                del self._all[oldest]
                oldest.close()
            try:
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self._answered), "127.0.0.1", self._port, local_addr=(next(self._addresses), 0)
                )
            except ConnectionError:  # refused before it was heard
                self.sent += 1
                self.answers[0] += 1
                return
            except OSError:
                self.held_back += 1
                return
            self._all[connection] = None
        self.sent += 1
        connection.send(next(self._requests))

    def _answered(self, connection: Connection, status: int) -> None:
        self.answers[status] += 1
        if status == 0:
            self._all.pop(connection, None)
        else:
            self._free.append(connection)
