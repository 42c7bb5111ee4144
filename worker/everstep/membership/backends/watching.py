"""The common part of round stores behind a network: one thread follows the store, and callers wait for that thread.

It knows no protocol: each store implements `_follow`. Invariant: the thread ends only with the store. After any error
it tries again, with a bounded back-off.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from random import Random

from everstep.contract.forks import after_fork
from everstep.membership.errors import RendezvousFailed
from everstep.membership.store import Backoff, View

log = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0  # to wait for the thread's end: it may be connecting
RETRY = Backoff(first=0.05, most=1.0)


class Watching(ABC):
    """`_view` is the newest known view, guarded by `_changed`. Each process that uses the store has its own thread."""

    def __init__(self, random: Random | None = None) -> None:
        self._random = random or Random()  # noqa: S311 - jitter
        self._changed = threading.Condition()
        self._view: View | None = None
        self._closed = False
        self._following: threading.Thread | None = None
        after_fork(self)

    def forked(self) -> None:
        """The child starts its own thread."""
        self._changed, self._following = threading.Condition(), None

    @abstractmethod
    def _follow(self) -> bool:
        """Wait for the store's next message and merge it into `_view`; whether one came that was new."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Close connections, also those on which a thread waits."""

    def watch(self, seen: View, timeout: float) -> View:
        """See `RoundStore`."""
        self._start_following()
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                view = self._view
                if view is not None and (view.edition, view.expirations) != (seen.edition, seen.expirations):
                    return view
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    return view or seen
                self._changed.wait(left)

    def close(self) -> None:
        """See `RoundStore`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            following, self._following = self._following, None
        self._disconnect()
        if following is not None and following is not threading.current_thread():
            following.join(CLOSE_SECONDS)

    def _start_following(self) -> None:
        with self._changed:
            if self._closed or self._following is not None:
                return
            self._following = threading.Thread(target=self._keep_following, name="everstep-rounds-watch", daemon=True)
            self._following.start()

    def _keep_following(self) -> None:
        failures = 0
        while not self._closed:
            try:
                failures = 0 if self._follow() else failures + 1
            except RendezvousFailed as e:
                failures += 1
                if not self._closed:
                    log.debug("the watch is opened again: %s", e)
            except Exception:
                if self._closed:
                    return  # `close` ended its wait
                # If this thread ended, the agent would never hear of a change again.
                failures += 1
                log.exception("the watch failed and is opened again")
            if failures:
                with self._changed:
                    if not self._closed:
                        self._changed.wait(RETRY.seconds(failures, self._random))
