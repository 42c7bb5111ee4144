"""Resets objects with locks and connections in a forked child.

A lock that another thread held at the fork stays held in the child for ever, and two processes would use one socket. So
each such object starts anew in the child. Objects are held weakly: registering keeps none alive.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    def forked(self) -> None:
        """In the child: new locks, no connections, no thread."""


_all: weakref.WeakSet[Forkable] = weakref.WeakSet()


def after_fork(owner: Forkable) -> None:
    """Have `one.forked()` called in every child that is forked from now on."""
    _all.add(owner)


def _in_child() -> None:
    for owner in list(_all):
        owner.forked()


os.register_at_fork(after_in_child=_in_child)
