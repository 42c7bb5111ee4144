"""The most memory that this process has held at once. Standard library only; whoever knows the device gives its figure.

Worker processes of a data loader are processes of their own, and are not in it. Pages that a forked process shares with
its fork server are, as in every figure of resident memory.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

LOOK_SECONDS = 10.0  # from one look whether the peak has grown to the next
GROWTH = 1.05  # how many times the peak that was told, so that it is told again


@dataclass(frozen=True, slots=True)
class Peak:
    """In bytes. `device`: of the accelerator; None without one, or if it is not known."""

    host: int = 0
    device: int | None = None


class PeakMemory:
    """The peak, and what was told of it. `device` gives that of the accelerator, in any thread."""

    def __init__(self) -> None:
        self.device: Callable[[], int] | None = None
        self._told: Peak | None = None
        self._looked = 0.0  # when it was told, or judged, last

    def read(self) -> Peak:
        """The peak so far, which is then told. An error in `device` counts as an unknown figure."""
        self._looked = time.monotonic()
        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        host = found if sys.platform == "darwin" else found * 1024
        try:
            peak = Peak(host, self.device() if self.device is not None else None)
        except Exception:  # a figure for people must not end the thread that reports
            peak = Peak(host)
        self._told = peak
        return peak

    def grew(self, now: float) -> bool:
        """Whether it is worth telling again. Looks at most every `LOOK_SECONDS`; `now` is monotonic."""
        told = self._told
        if told is None or now - self._looked < LOOK_SECONDS:
            return False
        peak = self.read()
        return peak.host > told.host * GROWTH or (peak.device or 0) > (told.device or 0) * GROWTH
