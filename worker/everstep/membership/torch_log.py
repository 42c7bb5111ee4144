"""Keeps torch's C++ warnings out of the log while a fault is expected for which we log a line of our own.

When the host of a process-group store dies, each call on that store raises an error in Python, and also logs twenty
lines of C++ frames. torch has no setting for that once it is imported, so this module raises the log level in its C++
library. It does not import torch. Invariant: errors are logged as before, and outside of `warnings_off` warnings too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

ERRORS = 2  # c10's levels: 0 information, 1 warnings, 2 errors, 3 fatal


class _Off:
    """How many callers want warnings off, and the level before the first of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count, self.before = 0, 0


_off = _Off()


@contextlib.contextmanager
def warnings_off() -> Iterator[None]:
    """Turns warnings off in the whole process. Does nothing if torch is not loaded, or has no such level."""
    level = _level()
    if level is None:
        yield
        return
    with _off.lock:
        _off.count += 1
        if _off.count == 1:
            _off.before = level.value
            level.value = max(level.value, ERRORS)
    try:
        yield
    finally:
        with _off.lock:
            _off.count -= 1
            if _off.count == 0:
                level.value = _off.before


def _level() -> ctypes.c_int | None:
    try:
        loaded = ctypes.CDLL("libc10.so", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        return ctypes.c_int.in_dll(loaded, "FLAGS_caffe2_log_level")
    except (OSError, ValueError, AttributeError):
        return None
