"""A round that forms while the one before is still trained in, so that nobody waits for a member that comes new.

All members begin to form when they hear of the round, each in a thread of its own; they leave for it at the end of a
step, when it has formed. If the round before breaks meanwhile, what is under way is waited for, like any other.
Invariant: a round is formed once in a process, because its members know each other by what was told in its store.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future

from everstep.recovery.forming import forming
from everstep.recovery.forming.forming import FormedRound


class BackgroundForming:
    """Of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: tuple[int, Future[FormedRound]] | None = None

    def start(self, number: int, form: Callable[[], FormedRound], then: Callable[[], None]) -> None:
        """Begin to form the round. `then` is called in that thread, whether it formed or not."""
        found: Future[FormedRound] = Future()
        self._replace((number, found))

        def run() -> None:
            try:
                found.set_result(form())
            except BaseException as e:
                found.set_exception(e)
            then()

        threading.Thread(target=run, name=f"everstep-ahead-{number}", daemon=True).start()

    def take(self, number: int) -> FormedRound | None:
        """The round, once it has formed; None if it was not begun. Raises what `form` did."""
        newest = self._replace(None, keep=number)
        return newest[1].result() if newest is not None else None

    def _replace(
        self, other: tuple[int, Future[FormedRound]] | None, keep: int = -1
    ) -> tuple[int, Future[FormedRound]] | None:
        with self._lock:
            before, self._newest = self._newest, other
        if before is not None and before[0] == keep:
            return before
        if before is not None:
            # Not here: to close its connections may take seconds, and whoever leaves a round holds locks.
            name = f"everstep-discard-{before[0]}"
            threading.Thread(target=_discard, args=(before[1],), name=name, daemon=True).start()
        return None


def _discard(found: Future[FormedRound]) -> None:
    """Once it has formed. Nothing was begun in it."""
    if found.exception() is None:
        with contextlib.suppress(forming.FormingFailed):
            forming.close(found.result(), [], [])
