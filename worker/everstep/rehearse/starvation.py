"""How much of the processor time that they wanted processes have got. Linux counts it for each thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

LEAST = 0.3  # of the wanted time; ranks that are more than the processors leave each other more than that


def is_starved(pid: int) -> bool:
    """Whether the process and its descendants have got less, since they began. False where nothing is counted. Linux
    counts the time too in which a container's limit holds them back."""
    ran = waited = 0
    for process in _with_descendants(pid):
        for thread in Path(f"/proc/{process}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):  # it has ended
                on_processor, on_queue, _ = map(int, thread.read_text().split())
                ran, waited = ran + on_processor, waited + on_queue
    return ran < LEAST * (ran + waited)


def _with_descendants(pid: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    waiting = [pid]
    while waiting:
        yield (one := waiting.pop())
        waiting += children.get(one, ())
