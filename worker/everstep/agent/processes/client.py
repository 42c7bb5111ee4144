"""The training processes as the agent sees them: started by the warm parent, spoken with over a socket.

Invariants: a signal goes only to a process that is known to be there; each end of a process is told once, also when the
warm parent itself dies; who connects and is none of ours is told nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

log = logging.getLogger(__name__)

MAX_LINE = 1024 * 1024
START_SECONDS = 300.0  # for the warm parent's imports, on a machine that does much else
STORE_SECONDS = 120.0
SEND_AGAIN_SECONDS = 0.1
BACKLOG = 1024
KEPT = 3  # stores: a process that leaves a round late still finds it

Exit = Callable[[int, int], None]  # pid, code
Message = Callable[[int, Mapping[str, Any]], None]  # pid, what it said


class WarmError(RuntimeError):
    """The warm parent could not be started, or could not fork; the text says why."""


class WarmParent:
    """Forks processes. Restarts itself when it dies, after it has told that all its processes are gone."""

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str], exited: Exit) -> None:
        self._modules, self._environ, self._exited = ",".join(modules), dict(environ), exited
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._asked: dict[int, asyncio.Future[int]] = {}
        self._alive: set[int] = set()
        self._next = 0
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start it, if it is not there; forks wait until it has imported its modules."""
        async with self._starting:
            if self._reading is None or self._reading.done():
                await self._start()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "everstep.agent.processes.forkserver", str(theirs.fileno()), str(os.getpid()),
                self._modules,
                pass_fds=(theirs.fileno(),), env=self._environ,
            )  # fmt: skip
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE)
        self._reading = asyncio.create_task(self._read(reader))

    async def fork(self, command: Mapping[str, Any]) -> int:
        """The pid of a new process. Raises WarmError."""
        await self.start()
        assert self._writer is not None
        self._next += 1
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked[self._next] = answer
        self._writer.write(json.dumps({**command, "id": self._next}).encode() + b"\n")
        try:
            return await asyncio.wait_for(answer, START_SECONDS)
        except TimeoutError:
            raise WarmError(f"the warm parent did not fork a process in {START_SECONDS:g} s") from None

    def signal(self, pid: int, number: int, *, group: bool = True) -> None:
        """To the process and what it started in its group. One that has ended is left alone."""
        if pid in self._alive:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(pid, number)

    async def close(self) -> None:
        """End it, and with it whatever is left of its processes."""
        for pid in list(self._alive):
            self.signal(pid, signal.SIGKILL)
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._hear(json.loads(line))
        assert self._process is not None
        code = await self._process.wait()
        log.error("the warm parent ended (%d), and its %d processes with it", code, len(self._alive))
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(WarmError(f"the warm parent ended with code {code}"))
        for pid in sorted(self._alive):
            self._alive.discard(pid)
            self._exited(pid, -signal.SIGKILL)

    def _hear(self, message: Mapping[str, Any]) -> None:
        if "forked" in message:
            answer = self._asked.pop(message["forked"])
            if "pid" in message:
                self._alive.add(message["pid"])
            if answer.done():
                return
            if "pid" in message:
                answer.set_result(message["pid"])
            else:
                answer.set_exception(WarmError(f"no process could be forked: {message['error']}"))
        elif "exited" in message:
            pid = message["exited"]
            self._alive.discard(pid)
            self._exited(pid, message["code"])


class Switchboard:
    """The socket on which processes say who they are, and are told of rounds."""

    def __init__(self, path: str, heard: Message) -> None:
        self.path = path
        self._heard = heard
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._stores: asyncio.StreamWriter | None = None
        self._asked: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._there = asyncio.Event()
        self._listeners: list[socket.socket] = []  # of the newest stores: who hosts them next gets them, too
        self._next = 0

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=MAX_LINE)

    def tell(self, pid: int, **message: Any) -> None:
        """To a process that said hello; another hears nothing."""
        writer = self._writers.get(pid)
        if writer is not None and not writer.is_closing():
            writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def open_store(self) -> int:
        """The port of a new process-group store. It is bound here, so that it is known at once: whoever connects before
        the store is there waits for it."""
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
        """To the process that hosts stores, if it is there. One that has ended, or is about to, has a successor."""
        if self._stores is None or listener not in self._listeners:
            return
        try:
            with socket.socket(fileno=os.dup(_descriptor(self._stores))) as raw:
                socket.send_fds(raw, [b'{"kind":"store"}\n'], [listener.fileno()])
        except BlockingIOError:  # it does not read for now
            asyncio.get_running_loop().call_later(SEND_AGAIN_SECONDS, self._send, listener)
        except OSError as e:
            log.info("a store is given to the next process that hosts them: %s", e)

    async def ask_stores(self, **message: Any) -> Mapping[str, Any]:
        """What the process says that hosts stores. Raises WarmError if it does not answer."""
        try:
            async with asyncio.timeout(STORE_SECONDS):
                await self._there.wait()
                assert self._stores is not None
                self._next += 1
                answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
                self._asked[self._next] = answer
                self._stores.write(json.dumps({**message, "id": self._next}).encode() + b"\n")
                return await answer
        except (TimeoutError, ConnectionError) as e:
            raise WarmError(f"the process that hosts stores does not answer ({e or 'time is over'})") from e

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
                if kind == "hello":
                    pid = int(message["pid"])
                    self._writers[pid] = writer
                elif kind == "stores":
                    self._stores = writer
                    self._there.set()
                    for listener in self._listeners:
                        self._send(listener)
                elif writer is self._stores:
                    answer = self._asked.pop(message["id"], None)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                    continue
                if pid:
                    self._heard(pid, message)
        except ConnectionError:
            pass  # it has ended
        except (ValueError, KeyError, TypeError) as e:
            log.warning("process %d said what cannot be read: %s", pid, e)
        finally:
            if writer is self._stores:
                self._stores = None
                self._there.clear()
            if self._writers.get(pid) is writer:
                del self._writers[pid]
            writer.close()


def _descriptor(writer: asyncio.StreamWriter) -> int:
    found: int = writer.get_extra_info("socket").fileno()
    return found
