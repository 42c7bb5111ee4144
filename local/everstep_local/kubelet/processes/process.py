"""Starts one container's processes below a guard, and watches them from the kubelet's event loop.

Invariant: a started `Process` ends, with all processes below it, when it is stopped, when its main process ends, when
its guard dies, and when this process dies in any way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

GUARD = Path(__file__).with_name("guard.py")
# Marks every process of a pod, so that even one whose guard was killed can be found.
MARK = "EVERSTEP_LOCAL_POD"
MAX_REPORT = 4096
# A guard that has reported, or lost its pipe, only has to exit.
GUARD_EXIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to run. `env` is the whole environment. The guard removes `folder` if this process dies."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    log: Path
    log_limit: int  # bytes
    folder: Path
    mark: str  # unique to the pod among all runs on this machine


@dataclass(frozen=True, slots=True)
class Refused:
    """The program could not be executed. `errno` is the system's reason."""

    errno: int


class Process:
    """A running process, made by `start` in an event loop. `on_change` is called there at the start, a refusal and the
    end."""

    def __init__(self, spec: ProcessSpec, on_change: Callable[[], None]) -> None:
        self._mark = spec.mark
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._pid: int | None = None
        self._refused: Refused | None = None
        self._exit_code: int | None = None
        self._ended = asyncio.Event()
        self._guard, self._commands, self._status = _launch(spec)
        self._loop.add_reader(self._status, self._read)

    @classmethod
    def start(cls, spec: ProcessSpec, on_change: Callable[[], None]) -> Process:
        """Start the guard. Raises OSError if it cannot be started (no process, file or memory left)."""
        return cls(spec, on_change)

    @property
    def pid(self) -> int | None:
        """The process ID of the main process, once it is known to run."""
        return self._pid

    @property
    def refused(self) -> Refused | None:
        return self._refused

    @property
    def exit_code(self) -> int | None:
        """The exit code: 0 to 255, 128 + n for signal n; None while any of its processes runs."""
        return self._exit_code if self._ended.is_set() else None

    def terminate(self) -> None:
        """Send SIGTERM to the main process and its group."""
        self._command(b"T")

    def kill(self) -> None:
        """Send SIGKILL to all processes. Returns at once; `wait` for the end."""
        self._command(b"K")

    async def wait(self) -> int:
        """Wait until none of its processes is left. Returns the exit code."""
        await self._ended.wait()
        assert self._exit_code is not None
        return self._exit_code

    def _command(self, command: bytes) -> None:
        # A guard that is gone needs no command: its pipe will report the end.
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            if not self._ended.is_set():
                os.write(self._commands, command)

    def _read(self) -> None:
        data = os.read(self._status, MAX_REPORT)
        self._received = (self._received + data)[-MAX_REPORT:]
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            match json.loads(line):
                case {"started": int(pid)}:
                    self._pid = pid
                case {"refused": int(errno)}:
                    self._refused = Refused(errno)
                case {"exit": int(code)}:
                    self._exit_code = code
        if not data:
            self._close()
        if lines or not data:
            self._on_change()

    def _close(self) -> None:
        """The guard has closed its end of the pipe, so it is gone or about to exit."""
        self._loop.remove_reader(self._status)
        os.close(self._status)
        os.close(self._commands)
        try:
            self._guard.wait(GUARD_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait(GUARD_EXIT_SECONDS)
        if self._exit_code is None:
            log.warning("the guard of a container was killed", extra={"guard": self._guard.pid})
            self._exit_code = 137
            kill_marked(self._mark)
        self._ended.set()


def _launch(spec: ProcessSpec) -> tuple[subprocess.Popen[bytes], int, int]:
    """Launch the guard. Returns it, the fd for commands and the fd of its reports."""
    # The spec is in a file, because everybody may read a command line. The guard removes it.
    order = spec.log.with_name("order.json")
    body = {
        "argv": list(spec.argv),
        "env": {**spec.env, MARK: spec.mark},
        "cwd": str(spec.cwd),
        "log": str(spec.log),
        "log_limit": spec.log_limit,
        "folder": str(spec.folder),
        "kubelet": os.getpid(),
    }
    with os.fdopen(os.open(order, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(body, file)
    read_end, commands = os.pipe()
    status, write_end = os.pipe()
    try:
        with open(spec.log.with_name("guard.err"), "wb") as errors:
            guard = subprocess.Popen(
                [sys.executable, "-S", "-E", str(GUARD), str(order), str(write_end)],
                stdin=read_end,
                stdout=errors,
                stderr=errors,
                pass_fds=(write_end,),
                start_new_session=True,  # the kubelet handles a terminal's Ctrl-C
                env={"PATH": os.environ.get("PATH", os.defpath)},
                cwd="/",
            )
    except BaseException:
        os.close(commands)
        os.close(status)
        raise
    finally:
        os.close(read_end)
        os.close(write_end)
    os.set_blocking(commands, False)
    return guard, commands, status


def kill_marked(mark: str) -> int:
    """Send SIGKILL to every process whose environment contains `mark`, and count them. This works only with /proc."""
    wanted = f"{MARK}={mark}".encode()
    killed = 0
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as environ:
            if wanted in environ.read().split(b"\0"):
                os.kill(int(name), signal.SIGKILL)
                killed += 1
    return killed
