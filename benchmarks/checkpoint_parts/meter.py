"""What one measured act cost a process: wall time, CPU seconds, and the memory it took beyond what was there before.

Memory is the kernel's own high-water mark of the resident set, reset before the act: nothing is sampled, so no peak is
missed. It does not count page cache, nor what a tmpfs holds.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median


@dataclass(slots=True)
class Sample:
    """One act on one rank. Times are of the machine's monotonic clock, which all processes share, in seconds."""

    start: float = 0.0
    end: float = 0.0
    cpu: float = 0.0
    extra: int = 0  # bytes
    blocked: float = 0.0  # the part that the training loop waited for; 0 where it waited for all of it


@dataclass(frozen=True, slots=True)
class Joint:
    """One act of all ranks together: from the first start to the last end; sums of CPU seconds and memory."""

    wall: float
    cpu: float
    extra: int
    blocked: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Joint:
        wall = max(s.end for s in samples) - min(s.start for s in samples)
        return cls(wall, sum(s.cpu for s in samples), sum(s.extra for s in samples), max(s.blocked for s in samples))


def middle(joints: Sequence[Joint], what: Callable[[Joint], float] = lambda j: j.wall) -> float:
    """The median over the rounds."""
    return median(what(j) for j in joints)


@contextmanager
def measured(before: int | None = None) -> Iterator[Sample]:
    """Fill the sample with what the body cost. `before`: resident bytes to count from, instead of those of now."""
    sample = Sample()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: see proc(5)
    base = resident() if before is None else before
    sample.start, cpu = time.monotonic(), cpu_seconds()
    yield sample
    sample.end, sample.cpu = time.monotonic(), cpu_seconds() - cpu
    sample.extra = max(0, _status("VmHWM") - base)


def resident() -> int:
    """Resident bytes of this process now."""
    return _status("VmRSS")


def cpu_seconds() -> float:
    """User and system seconds of all threads of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: the benchmark needs Linux")
