"""Process groups at the end of a process: what torch 2.13's gloo does with Python's lock is done before Python goes.

A thread of gloo's takes that lock to free the tensors of a collective that has ended. If it asks when the interpreter
is being taken down, the process ends with SIGABRT and its exit code is lost: of FSDP2's processes on a busy machine
11 of 72, since a sharded module keeps its groups after they were destroyed.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

TASKS = Path("/proc/self/task")
THREAD = "pt_gloo_runloop"
LOOK = 0.005  # seconds between two looks; Python hands its lock to whoever waits for it meanwhile
LIMIT = 2.0  # seconds

_left: list[Any] = []  # groups that were left


def leave_group() -> None:
    """Leave the default process group. Until the process ends something holds it: where a DDP object that outlives the
    run was the last to do so, torch 2.13 freed gloo's group with Python's lock in hand, for which the group's own
    threads may wait. Then the process hung at its end."""
    if not _left:
        atexit.register(_left.clear)
    _left.append(dist.group.WORLD)
    dist.destroy_process_group()


def part() -> None:
    """Take the process groups down while Python is whole."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def quiesce(limit: float = LIMIT) -> None:
    """Wait until all threads of gloo's sleep, in two looks one after the other; `limit` seconds at most."""
    ends, quiet = time.monotonic() + limit, 0
    while quiet < 2 and time.monotonic() < ends:
        quiet = 0 if any(_states()) else quiet + 1
        if quiet < 2:
            time.sleep(LOOK)


def _states() -> list[bool]:
    """Whether each of gloo's threads is busy; none where the system does not say."""
    found = []
    for task in TASKS.glob("[0-9]*"):
        try:
            if (task / "comm").read_text().strip() == THREAD:
                found.append((task / "stat").read_text().rpartition(")")[2].split()[0] != "S")
        except OSError:  # it has ended
            continue
    return found
