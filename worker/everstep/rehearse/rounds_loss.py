"""Stops the agent of a run for a while, and with it the rounds of one machine, which it keeps."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from everstep.rehearse.record import ROUNDS_AWAY, ROUNDS_BACK, ROUNDS_WANTED

SECONDS = 4.0  # for which it is stopped: longer than its lease


class RoundsLoss:
    """Of the agent with this `pid`, which a training process of its run wants to be stopped by a file in `folder`.
    `look` is called often."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._folder, self._pid = folder, pid
        self._stopped: float | None = None

    def look(self) -> None:
        now = time.monotonic()
        if self._stopped is None and (self._folder / ROUNDS_WANTED).exists():
            os.kill(self._pid, signal.SIGSTOP)
            self._stopped = now
            (self._folder / ROUNDS_AWAY).touch()
        elif self._stopped is not None and now > self._stopped + SECONDS:
            self.end()

    def end(self) -> None:
        """Let it go on. A process that is stopped hears no SIGTERM."""
        if self._stopped is not None and not (self._folder / ROUNDS_BACK).exists():
            os.kill(self._pid, signal.SIGCONT)
            (self._folder / ROUNDS_BACK).touch()
