"""Processes that stand still: only of what stands does what was read hold a moment later."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

LIMIT = 30.0  # seconds until all have stopped


def stand_still(pids: Iterable[int]) -> None:
    """Stop these, and wait until no thread of theirs runs any more, nor is about to end a call of the kernel's."""
    pids = list(pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + LIMIT
    while not all(_stands(pid) for pid in pids):
        assert time.monotonic() < deadline, f"not all of {pids} stop in {LIMIT} s"
        time.sleep(0.002)


def go_on(pids: Iterable[int]) -> None:
    """Let them run again; one that was killed meanwhile is left alone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _stands(pid: int) -> bool:
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    return all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)
