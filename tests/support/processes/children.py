"""The processes that a process started, as the kernel tells; for scripts that a test runs too: nothing else is here."""

from __future__ import annotations

import contextlib
from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that a process started, and that have not ended; the oldest first, because pids wrap around. Of one
    tick the kernel lists them as they came."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, listed.read_text().split())
    born = [(int(fields[19]), child) for child in found if (fields := stat(child))[0] != "Z"]  # since boot, in ticks
    return [child for _, child in sorted(born, key=lambda one: one[0])]


def stat(pid: int) -> list[str]:
    """A process's state, parent, group, session and so on; of one that is gone, as if it had just ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z", "", "", ""]
