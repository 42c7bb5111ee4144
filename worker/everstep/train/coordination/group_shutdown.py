"""Shuts process groups down at the end of a process, before the interpreter goes.

A thread of torch 2.13's gloo takes Python's lock to free the tensors of a finished collective. If it does so while the
interpreter shuts down, the process ends with SIGABRT and its exit code is lost. On a busy machine, that happened to 11
of 72 processes with FSDP2, because a sharded module keeps its groups after they were destroyed.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

TASKS = Path("/proc/self/task")
THREAD = "pt_gloo_runloop"
LOOK = 0.005  # seconds between two checks; meanwhile a waiting thread gets Python's lock
LIMIT = 2.0  # seconds

_kept_groups: list[Any] = []  # default groups of this process, until it ends


def hold_group() -> None:
    """Hold the default process group until the process ends, also where the script destroys it. If a DDP object were
    the last to hold it, torch 2.13 would free gloo's group while it holds Python's lock. The group's threads may wait
    for that lock, and the process would hang."""
    group = dist.group.WORLD
    if not _kept_groups:
        atexit.register(_kept_groups.clear)
    if all(group is not kept for kept in _kept_groups):
        _kept_groups.append(group)


def leave_group() -> None:
    """Leave the default process group, but hold it until the process ends."""
    hold_group()
    dist.destroy_process_group()


def part() -> None:
    """Destroy the process groups while the interpreter still works."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def quiesce(limit: float = LIMIT) -> None:
    """Wait until all gloo threads sleep in two checks in a row; `limit` seconds at most."""
    ends, quiet = time.monotonic() + limit, 0
    while quiet < 2 and time.monotonic() < ends:
        quiet = 0 if any(_states()) else quiet + 1
        if quiet < 2:
            time.sleep(LOOK)


def _states() -> list[bool]:
    """Whether each of gloo's threads is busy; empty if the system does not say."""
    busy = []
    for task in TASKS.glob("[0-9]*"):
        try:
            if (task / "comm").read_text().strip() == THREAD:
                busy.append((task / "stat").read_text().rpartition(")")[2].split()[0] != "S")
        except OSError:  # the thread has ended
            continue
    return busy
