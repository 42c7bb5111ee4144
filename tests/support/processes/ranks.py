"""A world of ranks over gloo, without a launcher: the environment that torchrun gives, and processes that begin warm.

As with torchrun, one that fails is the end of all: the others have a while to notice it themselves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from support.processes.warm_python import Process, Warm

NOTICE = 30.0  # seconds for the others when one has failed


class Ranks:
    """`argv` in so many processes; with none, one outside of any world. Each has a session of its own."""

    def __init__(
        self, parent: Warm, count: int, argv: Sequence[object], output: Path, environ: Mapping[str, str],
        cwd: Path | None = None,
    ) -> None:  # fmt: skip
        self._processes: list[Process] = []
        self._store: Any = None
        if count:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=2))
        with output.open("ab") as out:
            for rank in range(max(count, 1)):
                variables = {**environ, **(self._world(rank, count) if count else {})}
                options: dict[str, Any] = {
                    "stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True, "cwd": cwd,
                }  # fmt: skip
                self._processes.append(parent.popen(*argv, env=variables, **options))

    def _world(self, rank: int, count: int) -> dict[str, str]:
        return {
            "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "GLOO_SOCKET_IFNAME": "lo",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "test",
        }  # fmt: skip

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return [p.pid for p in self._processes]

    def poll(self) -> list[int] | None:
        """Their exit codes, by rank, when all have ended."""
        codes = [p.poll() for p in self._processes]
        return None if None in codes else [code for code in codes if code is not None]

    def wait(self, seconds: float) -> list[int]:
        """Their exit codes, by rank. Raises TimeoutError."""
        end, failed = time.monotonic() + seconds, False
        while (codes := self.poll()) is None:
            if not failed and any(p.returncode for p in self._processes):
                end, failed = min(end, time.monotonic() + NOTICE), True
            running = next(p for p in self._processes if p.returncode is None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(0.5)
            if time.monotonic() > end:
                raise TimeoutError(f"ranks still run: {[p.poll() for p in self._processes]}")
        return codes

    def kill(self) -> None:
        """End them, and what they started."""
        sessions = {str(pid) for pid in self.pids}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError):
                if stat.read_text().rpartition(")")[2].split()[3] in sessions:
                    os.kill(int(stat.parent.name), signal.SIGKILL)
        for process in self._processes:
            process.kill()  # one that has just been forked has no session of its own yet
            process.wait(10)
