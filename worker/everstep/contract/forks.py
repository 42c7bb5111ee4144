"""Starts objects with locks and connections anew in a forked child.

A DataLoader worker is forked while other threads may hold locks. A lock that another thread held at the fork stays held
in the child for ever, and two processes would use one socket. Objects are held weakly: registering keeps none alive.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Protocol


class Forkable(Protocol):
    def forked(self) -> None:
        """In the child: new locks, no connections, no thread."""


_all: weakref.WeakSet[Forkable] = weakref.WeakSet()


def after_fork(owner: Forkable) -> None:
    """Have `owner.forked()` called in every child that is forked from now on."""
    _all.add(owner)


class ForkLock:
    """A mutual exclusion of threads, for `with`. In a forked child nobody holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        after_fork(self)

    def forked(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()


def _in_child() -> None:
    for owner in list(_all):
        owner.forked()


os.register_at_fork(after_in_child=_in_child)
