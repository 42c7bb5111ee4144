"""Starts the agents of a rehearsal's runs, forked from one fork server that has imported torch once for all of them. To
import it anew in each run takes longer than most runs of a small script.

Without torch: the command line imports it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, TypeVar

from everstep.agent.processes.client import ForkServer, ForkServerError

T = TypeVar("T")

PROGRAM = "everstep.rehearse.agent"
# What each rank of a rehearsal imports, besides torch.
MODULES = ("torch.nn.parallel", "everstep.agent.main", "everstep.rehearse.entry")


class Stopped(Exception):
    """The rehearsal ends before its runs have."""


class RunAgent:
    """As `subprocess.Popen`, of the agent of one run."""

    def __init__(self, pid: int, code: Future[int], server: ForkServer) -> None:
        self.pid, self._code, self._server = pid, code, server

    def poll(self) -> int | None:
        return self._code.result() if self._code.done() else None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises `subprocess.TimeoutExpired`."""
        try:
            return self._code.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(PROGRAM, timeout or 0.0) from None

    def send_signal(self, number: int, *, group: bool = False) -> None:
        """To the agent; with `group` to its fork server too. Does nothing if it has ended."""
        self._server.signal(self.pid, number, group=group)


class Agents:
    """Of one rehearsal. `modules`: imported before the first fork; `output`: a file for what is printed by that."""

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str], output: Path) -> None:
        self._codes: dict[int, Future[int]] = {}  # used in the loop's thread alone
        self._starting = set[Future[RunAgent]]()  # by several threads
        self._stopped = False
        self._loop = asyncio.new_event_loop()
        self._server = ForkServer([*modules, *MODULES], environ, self._exited, output)
        # The kernel ends the fork server with the thread that has started it: that lives as long as the process.
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def start(self, arguments: Sequence[str], environ: Mapping[str, str], log: Path, folder: Path) -> RunAgent:
        """Start `everstep-run ARGUMENTS` in this folder; its output is appended to `log`. Raises `OSError`, and
        `Stopped` behind `stop`."""
        command = {
            "kind": "program", "target": PROGRAM, "arguments": [str(folder), *arguments], "module": True,
            "executable": False, "environment": dict(environ), "stdout": str(log), "stderr": str(log),
            "stacks": os.devnull,
        }  # fmt: skip
        starting = asyncio.run_coroutine_threadsafe(self._fork(command), self._loop)
        self._starting.add(starting)
        if self._stopped:  # `stop` may have come before it was added
            starting.cancel()
        try:
            return starting.result()
        except CancelledError:
            raise Stopped from None
        except ForkServerError as e:
            raise OSError(f"the agent of a run could not be started: {e}") from e
        finally:
            self._starting.discard(starting)

    def stop(self) -> None:
        """Start no other agent. One that waits for the imports is not waited for: on a busy machine they take a
        minute. Any thread may call it."""
        self._stopped = True
        for starting in self._starting.copy():
            starting.cancel()

    def close(self) -> None:
        """End the fork server, and all that it has started."""
        self._call(self._server.close())

    def _call(self, task: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(task, self._loop).result()

    async def _fork(self, command: Mapping[str, Any]) -> RunAgent:
        pid = await self._server.fork(command)
        return RunAgent(pid, self._code(pid), self._server)

    def _code(self, pid: int) -> Future[int]:
        """The exit code of a process: for who has started it, and for who reports its end, whichever comes first."""
        code = self._codes.pop(pid, None)
        if code is None:
            code = self._codes[pid] = Future()
        return code

    def _exited(self, pid: int, code: int) -> None:
        self._code(pid).set_result(code)
