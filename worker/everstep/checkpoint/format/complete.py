"""Reads objects that another process may still be writing.

On most stores an object is visible only with all its bytes, so bytes that do not decode are damage. Where that is not
promised (`Capabilities.whole`), they may be the beginning of a write. Invariant: on such a store an object counts as
damaged only after its bytes have not changed for `QUIET_SECONDS`; waiting ends after `MOST_SECONDS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from everstep.checkpoint.errors import FormatError
from everstep.storage import ObjectStore

T = TypeVar("T")

QUIET_SECONDS: Final = 3.0
MOST_SECONDS: Final = 60.0
_PAUSE: Final = 0.1


def read_complete(
    store: ObjectStore,
    name: str,
    decode: Callable[[bytes], T],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """The object, decoded by `decode`. Raises its `FormatError` for a damaged one, `NotFound`, and `StorageError`."""
    began = changed = clock()
    data = store.get(name)
    while True:
        try:
            return decode(data)
        except FormatError:
            now = clock()
            if store.capabilities.whole or now - changed >= QUIET_SECONDS or now - began >= MOST_SECONDS:
                raise
        sleep(_PAUSE)
        newest = store.get(name)
        if newest != data:
            data, changed = newest, clock()
