"""What a follower does at SIGTERM: it stays while its hub may need it.

If all processes of a job are told to stop at once, the hub ends its step, saves and leaves. It cannot end a step for
which it waits for its followers, if those have ended at once. Invariant: the process ends by the signal, as it would
have done, when the hub has left, or after half of the grace period: the hub needs the other half to save.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType, TracebackType

from everstep.contract import env


class Staying:
    """A context in which SIGTERM is put off. It works in the main thread, if the script has no handler of its own."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._seconds = env.grace_seconds(environ) / 2
        self._pid = os.getpid()
        self._timer: threading.Timer | None = None
        self._installed = False

    def __enter__(self) -> Staying:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()  # the script ends, or goes on without a hub
        if self._installed and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def hub_left(self) -> None:
        """End this process, if it was asked to stop."""
        if self._timer is not None:
            os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != self._pid:  # a process that was forked meanwhile, such as a DataLoader's worker
            os.kill(os.getpid(), number)
            return
        self._timer = threading.Timer(self._seconds, os.kill, (self._pid, number))
        self._timer.daemon = True
        self._timer.start()
