"""The control socket: the Unix socket on which training processes identify themselves and hear of rounds.

The process that hosts the process-group stores uses it too. Invariant: a foreign process that connects is told nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from everstep.agent.processes.client import MAX_LINE

log = logging.getLogger(__name__)

STORE_SECONDS = 120.0
SEND_AGAIN_SECONDS = 0.1
CLOSED_SECONDS = 1.0  # for the connection of a process that has ended; a child of it may keep it open
BACKLOG = 1024
KEPT = 3  # stores of the newest rounds: a process that leaves a round late still finds its store

Message = Callable[[int, Mapping[str, Any]], None]  # pid, message


class StoresUnavailable(RuntimeError):
    """The process that hosts stores does not answer."""


class ControlSocket:
    """Listens at `path`; `received` gets the messages of processes."""

    def __init__(self, path: str, received: Message) -> None:
        self.path = path
        self._received = received
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._closed: dict[int, asyncio.Event] = {}
        self._stores: asyncio.StreamWriter | None = None
        self._unanswered: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._there = asyncio.Event()
        self._listeners: list[socket.socket] = []  # of the newest stores; a new hosting process gets them, too
        self._next = 0

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=MAX_LINE)

    def tell(self, pid: int, **message: Any) -> None:
        """Send a message to a process that said hello; to no other one."""
        writer = self._writers.get(pid)
        if writer is not None and not writer.is_closing():
            writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    async def closed(self, pid: int) -> None:
        """Return when all messages of this process have been read. It has ended; they may come later than that."""
        if (event := self._closed.get(pid)) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSED_SECONDS):
                    await event.wait()

    def open_store(self) -> int:
        """The port of a new process-group store. The port is bound here, so that it is known at once. A client that
        connects before the store is there waits for it."""
        if socket.has_dualstack_ipv6():
            listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
        else:
            listener = socket.create_server(("", 0), backlog=BACKLOG)
        port = int(listener.getsockname()[1])
        self._listeners.append(listener)
        for old in self._listeners[:-KEPT]:
            old.close()
        del self._listeners[:-KEPT]
        self._send(listener)
        return port

    def _send(self, listener: socket.socket) -> None:
        """Send the listener to the process that hosts stores, if it is there. If it has ended, the next one gets it."""
        if self._stores is None or listener not in self._listeners:
            return
        try:
            with self._stores.get_extra_info("socket").dup() as raw:
                socket.send_fds(raw, [b'{"kind":"store"}\n'], [listener.fileno()])
        except BlockingIOError:  # it does not read at the moment
            asyncio.get_running_loop().call_later(SEND_AGAIN_SECONDS, self._send, listener)
        except OSError as e:
            log.info("a store is given to the next process that hosts them: %s", e)

    async def ask_stores(self, **message: Any) -> Mapping[str, Any]:
        """Ask the process that hosts stores. Raises StoresUnavailable if it does not answer."""
        try:
            async with asyncio.timeout(STORE_SECONDS):
                await self._there.wait()
                assert self._stores is not None
                self._next += 1
                answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
                self._unanswered[self._next] = answer
                self._stores.write(json.dumps({**message, "id": self._next}).encode() + b"\n")
                return await answer
        except (TimeoutError, ConnectionError) as e:
            raise StoresUnavailable(f"the process that hosts stores does not answer ({e or 'time is over'})") from e

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for listener in self._listeners:
            listener.close()
        for writer in (*self._writers.values(), self._stores):
            if writer is not None:
                writer.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid = 0
        try:
            while line := await reader.readline():
                message = json.loads(line)
                kind = message["kind"]
                if kind in ("hello", "listens"):
                    pid = int(message["pid"])
                    self._writers[pid] = writer
                    self._closed[pid] = asyncio.Event()
                elif kind == "stores":
                    self._stores = writer
                    self._there.set()
                    for listener in self._listeners:
                        self._send(listener)
                elif writer is self._stores:
                    answer = self._unanswered.pop(message["id"], None)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                    continue
                if pid:
                    self._received(pid, message)
        except ConnectionError:
            pass  # the process has ended
        except (ValueError, KeyError, TypeError) as e:
            log.warning("process %d said what cannot be read: %s", pid, e)
        finally:
            if writer is self._stores:
                self._stores = None
                self._there.clear()
            if self._writers.get(pid) is writer:
                del self._writers[pid]
                self._closed.pop(pid).set()
            writer.close()
