"""Forms a round while the members of the last round still train, so that training does not wait for a new member.

When its agent announces a round, each member begins to form it in a background thread, and trains on. All change to it
at the end of the same step, once it has formed. If a peer of the last round is lost before that, nobody can train on:
each member waits for its background thread, and changes to the new round then. Invariant: a process forms a round only
once. The members find each other by entries in the round's store, and a second attempt would find those of the first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future

from everstep.recovery.forming import forming
from everstep.recovery.forming.forming import FormedRound


class BackgroundForming:
    """The background forming of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: tuple[int, Future[FormedRound]] | None = None

    def start(self, number: int, form: Callable[[], FormedRound], then: Callable[[], None]) -> None:
        """Begin to form the round. `then` is called in the background thread, whether the round formed or not."""
        future: Future[FormedRound] = Future()
        self._replace((number, future))

        def run() -> None:
            try:
                future.set_result(form())
            except BaseException as e:
                future.set_exception(e)
            then()

        threading.Thread(target=run, name=f"everstep-ahead-{number}", daemon=True).start()

    def pop(self, number: int) -> FormedRound | None:
        """Wait for the round and return it; None if it was not begun. Raises the error of `form`."""
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
            # In a thread of its own: closing its connections may take seconds, and the caller holds locks.
            name = f"everstep-discard-{before[0]}"
            threading.Thread(target=_discard, args=(before[1],), name=name, daemon=True).start()
        return None


def _discard(forming_round: Future[FormedRound]) -> None:
    """Close the round once it has formed. No collective was begun in it."""
    if forming_round.exception() is None:
        with contextlib.suppress(forming.FormingFailed):
            forming.close(forming_round.result(), [], [])
