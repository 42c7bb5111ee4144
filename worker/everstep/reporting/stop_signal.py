"""Notes SIGTERM, so that a process finishes its step, commits, and leaves with an exit code of its own.

This module knows nothing of training. Invariant: the handler only sets a flag; the former handler is restored
afterwards, unless an agent's process ends because it was asked to; a process forked meanwhile (a DataLoader's worker)
is ended by the signal as usual.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

from everstep.contract import env, exit_codes, termination

MARGIN = 0.15  # of the grace period, for the work after the commit


_answered = False


@atexit.register  # before the script's own functions are, so it is called after them
def _ignore_when_python_ends() -> None:
    """Python gives SIGTERM its default effect back when it takes its handlers away."""
    if _answered:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Preempted(SystemExit):
    """The process stops because it was asked to. Ends Python with exit code 86, without a traceback.

    `step`: completed steps; `committed`: whether the state after them is durable.
    """

    def __init__(self, step: int, committed: bool) -> None:
        super().__init__(exit_codes.PREEMPTED)
        self.step, self.committed = step, committed

    def __str__(self) -> str:
        kept = "its state is committed" if self.committed else "its state is NOT committed"
        return f"asked to stop; stopped after step {self.step}, {kept}"


class Left(Preempted):
    """The process stops because it was asked to, and the others train on without it. No commit was needed."""

    def __init__(self, step: int) -> None:
        super().__init__(step, committed=False)

    def __str__(self) -> str:
        return f"asked to stop; left after step {self.step}, the others train on"


class StopSignal:
    """A context in which SIGTERM is noted instead of ending the process. It works only in the main thread: elsewhere
    Python allows no handler, and SIGTERM keeps its effect."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._grace = env.grace_seconds(environ)
        self._has_agent = env.AGENT_SOCKET in environ
        self._pid = os.getpid()
        self._at: float | None = None
        self._before: Any = None
        self._installed = False

    @property
    def requested(self) -> bool:
        return self._at is not None

    @property
    def replaced(self) -> bool:
        """Whether the program has set another handler since, so that SIGTERM is no longer noted."""
        return self._installed and signal.getsignal(signal.SIGTERM) != self._note

    def remaining(self) -> float:
        """Seconds that are left to commit and to leave; the whole time if there was no SIGTERM yet."""
        usable = self._grace * (1 - MARGIN)
        return usable if self._at is None else max(0.0, usable - (time.monotonic() - self._at))

    def install(self) -> None:
        """Note SIGTERM from now on, for as long as this process lives."""
        if not self._installed:
            self.__enter__()

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        if self._installed:
            # A loop that was left open is closed when Python collects it. A later run's handler stays.
            is_mine = not self.replaced
            self._installed = False
            if is_mine:
                signal.signal(signal.SIGTERM, self._former())

    def _former(self) -> Any:
        """The handler before this one, and before those whose contexts are over."""
        handler = self._before
        while isinstance(owner := getattr(handler, "__self__", None), StopSignal) and not owner._installed:
            handler = owner._before
        return handler if handler is not None else signal.SIG_DFL

    def answered(self) -> None:
        """From now on SIGTERM has no effect in an agent's process, which ends with an exit code of its own. Its agent
        may hear only now that all stop, and sends SIGTERM then: the process would end by it, as one that has saved
        nothing. The handler stays until Python ends: what the script starts meanwhile (`subprocess`) would inherit that
        the signal is ignored, and `terminate()` would not end it."""
        global _answered  # noqa: PLW0603 - of the process, as its handlers are
        if self._installed and self._has_agent and not self.replaced:
            self._installed = False
            _answered = True

    def leave(self, error: Preempted) -> None:
        """Let this process end with `error`, whose words the container's status shows."""
        self.answered()
        termination.write(str(error), exit_codes.PREEMPTED, [])

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._at is None:
            self._at = time.monotonic()
