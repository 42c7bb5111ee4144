"""Lets a second terminal control a local run: one JSON line in, JSON lines out, over a socket that only its user can
open.

The socket is in a folder of mode 0700, and is removed at the end of the run. A socket that a crash left behind refuses
connections, and the next command that finds it removes it. Bounds: a request is one line of 64 KiB at most, sent within
5 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

MAX_LINE = 64 * 1024
REQUEST_SECONDS = 5.0
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
STATUS_SECONDS = 10.0  # for what a run knows without any work
MAX_SOCKET_PATH = 100  # bytes: sockaddr_un has 108 on Linux and 104 on macOS

Answer = dict[str, Any]
Handler = Callable[[dict[str, Any]], AsyncIterator[Answer]]
_NAME = re.compile(r"(\d+)-([a-z0-9.-]+)\.sock")


class ControlError(Exception):
    """The run cannot be reached, or refused the request. The text says which."""


class RunGoneError(ControlError):
    """The run has ended, or its socket broke off."""


@dataclass(frozen=True, slots=True)
class RunAddress:
    """A run that may be alive."""

    name: str
    pid: int
    path: Path
    began: float = 0.0  # seconds since the epoch


def folder() -> Path:
    """The folder of the sockets of this user's runs. It is made if missing. Raises `ControlError` if it belongs to
    another user."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    path = base / f"everstep-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.stat(follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ControlError(f"{path} is not a folder that only you can open; remove it or set XDG_RUNTIME_DIR")
    return path


def alive() -> list[RunAddress]:
    """The runs of this user that are alive, the oldest first. Raises `ControlError`."""
    return sorted(_live(), key=lambda run: run.began)


def _live() -> Iterator[RunAddress]:
    for path in folder().glob("*.sock"):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CONNECT_SECONDS)
            try:
                began = path.stat().st_mtime
                probe.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                path.unlink(missing_ok=True)  # its run has crashed
                continue
            except OSError:
                continue  # it may only be busy
        yield RunAddress(match[2], int(match[1]), path, began)


def ask(address: RunAddress, verb: str, *, silence: float | None = None, **arguments: Any) -> Iterator[Answer]:
    """Send one request, and yield its answers as they come. A followed log may be silent for `silence` seconds; None:
    for any time. Raises `ControlError` with the run's own reason."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(CONNECT_SECONDS)
        try:
            connection.connect(str(address.path))
            connection.sendall(json.dumps({"verb": verb, **arguments}).encode() + b"\n")
            seconds = STATUS_SECONDS if verb == "status" else ANSWER_SECONDS
            connection.settimeout(silence if arguments.get("follow") else seconds)
            with connection.makefile("rb") as lines:
                for line in lines:
                    answer = json.loads(line)
                    if "error" in answer:
                        raise ControlError(answer["error"])
                    yield answer
        except TimeoutError as e:
            raise ControlError(f"run {address.name} does not answer; is it stopped?") from e
        except (OSError, ValueError) as e:
            raise RunGoneError(f"run {address.name} went away: {e}") from e


class ControlServer:
    """Serves `handlers` by verb for as long as the context is open. `name` is the run's, with a number behind it where
    another run of that name is alive: one name means one run."""

    def __init__(self, name: str, handlers: dict[str, Handler]) -> None:
        self._handlers = handlers
        taken = {run.name for run in _live()}
        self.name = next(n for i in count(1) if (n := name if i == 1 else f"{name}-{i}") not in taken)
        self._path = folder() / f"{os.getpid()}-{self.name}.sock"
        if len(os.fsencode(self._path)) > MAX_SOCKET_PATH:
            raise ControlError(f"{self._path} is too long for a socket; set XDG_RUNTIME_DIR to a shorter folder")
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ControlServer:
        self._server = await asyncio.start_unix_server(self._connected, self._path, limit=MAX_LINE)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._path.unlink(missing_ok=True)
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, TimeoutError):
            pass  # the client has gone
        finally:
            self._open.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send(answer: Answer) -> None:
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()

        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                line = await reader.readline()
            if not line:
                return  # the client only checked whether the run is alive
            request = json.loads(line)
            handler = self._handlers.get(request.pop("verb", ""))
            if handler is None:
                raise ControlError(f"unknown request; this run knows {', '.join(sorted(self._handlers))}")
            async for answer in handler(request):
                await send(answer)
        except (ControlError, ValueError, AttributeError) as e:
            await send({"error": str(e)})
