"""Keeps live objects out of garbage collections, which stop the event loop.

A full collection visits every object that may be part of a cycle. With all modules, types and caches that took 70 to
110 ms, several times a minute under load. A collection of the younger ones visits the objects of all connections that
were opened meanwhile: with 1,000 of them 20 ms, three times a second, which found nothing to free.
"""

from __future__ import annotations

import gc

# How many more objects there are than after the last collection when the next one starts. Nearly all objects are freed
# without a collection: what serves a request makes no cycles, and `connections` takes that of asyncio's transports
# apart. So a flood on thousands of connections starts no collection, and the few cycles that errors leave wait for one.
YOUNG = 200_000


def freeze_startup_objects() -> None:
    """Keep all present objects out of later collections. Call it once in a process, when its caches are full."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
