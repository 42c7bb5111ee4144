"""Keeps long-lived objects out of garbage collections.

A full collection visits every object that may be part of a cycle. With all modules, types and caches that stopped the
event loop for 70 to 110 ms, several times a minute under load.
"""

from __future__ import annotations

import gc

# The number of new objects that start a collection of the youngest ones. A request makes hundreds, none of them in a
# cycle. A much larger number would free thousands at once, for example after many connections broke, and the event loop
# would wait for that.
YOUNG = 2_000


def freeze_startup_objects() -> None:
    """Keep all present objects out of later collections. Call it once in a process, when its caches are full."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
