"""A lock that a forked child finds open.

A DataLoader worker is forked while other threads may hold locks; a plain one would then be held for ever in the child,
by a thread that does not exist there.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType


class ForkLock:
    """A mutual exclusion of threads, for `with`. In a forked child nobody holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _all.add(self)

    def renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()


_all: weakref.WeakSet[ForkLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_all):
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)
