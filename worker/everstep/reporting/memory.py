"""Measures the peak memory of this process. It uses the standard library only; the caller gives the device's figure.

The figure does not contain the worker processes of a data loader. It contains the pages that a forked process shares
with its fork server, as does every figure of resident memory.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

LOOK_SECONDS = 10.0  # between two checks whether the peak has grown
GROWTH = 1.05  # a peak that grew by this factor is reported again


@dataclass(frozen=True, slots=True)
class Peak:
    """Peaks in bytes. `device`: that of the accelerator; None without one, or if it is unknown."""

    host: int = 0
    device: int | None = None


class PeakMemory:
    """The peak, and the last reported one. `device` returns that of the accelerator, in any thread."""

    def __init__(self) -> None:
        self.device: Callable[[], int] | None = None
        self._told: Peak | None = None
        self._looked = 0.0  # when it was last reported or checked

    def read(self) -> Peak:
        """The peak so far, which counts as reported then. An error in `device` counts as an unknown figure."""
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
        """Whether the peak has grown enough to be reported again. This checks at most every `LOOK_SECONDS`; `now` is
        monotonic."""
        told = self._told
        if told is None or now - self._looked < LOOK_SECONDS:
            return False
        peak = self.read()
        return peak.host > told.host * GROWTH or (peak.device or 0) > (told.device or 0) * GROWTH
