"""Whole reads and writes at places of an open file: the kernel may take or give less than it is asked for at once.

All raise `OSError`.
"""

from __future__ import annotations

import os
from typing import Final

from everstep.storage.upload import Data

_VECTORS: Final = 1024  # the kernel's bound on the buffers of one read


def write(descriptor: int, offset: int, data: Data) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def read(descriptor: int, offset: int, views: list[memoryview]) -> int:
    """Fill the views, one after the other, from the file; how many bytes there were."""
    left, done = [view for view in views if view], 0
    while left:
        count = os.preadv(descriptor, left[:_VECTORS], offset + done)
        if not count:
            break
        done += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return done
