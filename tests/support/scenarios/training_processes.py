"""Which processes below a launcher train.

Standard library only: as a program it runs in a worker's container, where the launcher is process 1, and kills them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b""


def fields_of(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on; none of a process that is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return []


def children_of() -> dict[int, list[int]]:
    """By the parent's pid, in the order in which they were started."""
    found: dict[int, list[tuple[int, int]]] = {}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        if fields := fields_of(pid):
            found.setdefault(int(fields[1]), []).append((int(fields[19]), pid))
    return {parent: [pid for _, pid in sorted(children)] for parent, children in found.items()}


def trainers(launcher: int) -> list[int]:
    """torchrun starts them; the fork server of everstep-run forks them, after the process that hosts its stores."""
    below = children_of()
    warm = [pid for pid in below.get(launcher, ()) if b"everstep.agent.processes.forkserver" in command_of(pid)]
    if warm:
        return [pid for parent in warm for pid in below.get(parent, ())[1:]]
    return [pid for pid in below.get(launcher, ()) if b".py" in command_of(pid)]


if __name__ == "__main__":
    for one in trainers(1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
            print("killed", time.time())
