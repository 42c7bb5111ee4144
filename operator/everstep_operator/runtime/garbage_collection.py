"""Keeps objects that live as long as the process out of garbage collections.

A full collection goes through every object that may be part of a cycle; with all modules, types and caches that took
the event loop 70 to 110 ms, several times a minute under load.
"""

from __future__ import annotations

import gc

# Objects that are made before the young ones are looked at: a request makes hundreds, and none of them in a cycle. Not
# many more: where thousands are freed together, as those of connections that broke are, the event loop waits for it.
YOUNG = 2_000


def freeze_startup_objects() -> None:
    """Keep all that exists now out of later collections. Once a process, when its caches are full."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
