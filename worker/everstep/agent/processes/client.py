"""The agent's client of the fork server: it forks processes, sends them signals, and reports their ends.

Invariants: a signal goes only to a process that is known to exist; the end of each process is reported once, even if
the fork server itself dies.
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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from everstep.agent.processes.leftovers import KILL_SECONDS, TERM_SECONDS

log = logging.getLogger(__name__)

MAX_LINE = 1024 * 1024
START_SECONDS = 300.0  # for the fork server's imports, on a busy machine
CLOSE_SECONDS = TERM_SECONDS + KILL_SECONDS + 5.0  # for it to end its processes' leftovers, on a busy machine

Exit = Callable[[int, int], None]  # pid, code


class ForkServerError(RuntimeError):
    """The fork server could not be started, or could not fork; the message says why."""


class ForkServer:
    """Forks processes. If the fork server dies, the ends of all its processes are reported, and it is restarted."""

    def __init__(
        self, modules: Sequence[str], environ: Mapping[str, str], exited: Exit, output: Path | None = None
    ) -> None:  # fmt: skip
        """`output`: a file that what the fork server prints is appended to, in place of this process's own output."""
        self._modules, self._environ, self._exited = ",".join(modules), dict(environ), exited
        self._output = output
        self._process: Any = None  # as asyncio has it
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._unanswered: dict[int, asyncio.Future[int]] = {}
        self._alive: set[int] = set()
        self._next = 0
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the fork server, unless it runs; forks wait until it has imported its modules."""
        async with self._starting:
            if self._reading is None or self._reading.done():
                await self._start()

    async def _start(self) -> None:
        self._process, ours = await self._begin()
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE)
        self._reading = asyncio.create_task(self._read(reader))

    async def _begin(self) -> tuple[Any, socket.socket]:
        """A new fork server, as asyncio has processes, and our end of its commands."""
        ours, theirs = socket.socketpair()
        with theirs, self._output.open("ab") if self._output is not None else nullcontext() as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "everstep.agent.processes.forkserver", str(theirs.fileno()), str(os.getpid()),
                self._modules,
                pass_fds=(theirs.fileno(),), env=self._environ, stdout=output, stderr=output,
            )  # fmt: skip
        return process, ours

    async def fork(self, command: Mapping[str, Any]) -> int:
        """The pid of a new process. Raises ForkServerError."""
        await self.start()
        assert self._writer is not None
        self._next += 1
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._unanswered[self._next] = answer
        self._writer.write(json.dumps({**command, "id": self._next}).encode() + b"\n")
        try:
            return await asyncio.wait_for(answer, START_SECONDS)
        except TimeoutError:
            raise ForkServerError(
                f"the fork server did not fork a process in {START_SECONDS:g} s: the machine is too busy, or what it "
                f"imports once for all processes takes longer ({self._modules}). Give it more processors, or set "
                "EVERSTEP_PRELOAD to fewer modules, such as EVERSTEP_PRELOAD=torch: then each process imports the rest"
            ) from None

    def signal(self, pid: int, number: int, *, group: bool = True) -> None:
        """Send a signal to the process, and with `group` to its process group. Does nothing if it has ended."""
        if pid in self._alive:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(pid, number)

    async def close(self) -> None:
        """End the fork server, all its remaining processes, and what any of its processes has left."""
        for pid in list(self._alive):
            self.signal(pid, signal.SIGKILL)
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()  # the fork server ends by that, when it has nothing left to end
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._hear(json.loads(line))
        assert self._process is not None
        code = await self._process.wait()
        log.error("the fork server ended (%d), and its %d processes with it", code, len(self._alive))
        unanswered, self._unanswered = self._unanswered, {}
        for answer in unanswered.values():
            if not answer.done():
                answer.set_exception(ForkServerError(f"the fork server ended with code {code}"))
        for pid in sorted(self._alive):
            self.signal(pid, signal.SIGKILL)  # the kernel has killed it, but not what it had started
            self._alive.discard(pid)
            self._exited(pid, -signal.SIGKILL)

    def _hear(self, message: Mapping[str, Any]) -> None:
        if "forked" in message:
            answer = self._unanswered.pop(message["forked"])
            if "pid" in message:
                self._alive.add(message["pid"])
            if answer.done():
                return
            if "pid" in message:
                answer.set_result(message["pid"])
            else:
                answer.set_exception(ForkServerError(f"no process could be forked: {message['error']}"))
        elif "exited" in message:
            pid = message["exited"]
            self._alive.discard(pid)
            self._exited(pid, message["code"])
