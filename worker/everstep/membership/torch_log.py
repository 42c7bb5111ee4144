"""Keeps torch's C++ warnings out of the log while a fault is expected that is told in a line of our own.

When the host of a process-group store dies, each call on that store raises an error in Python, and also writes twenty
lines of C++ frames. torch has no setting for that after it was imported, so its library's own level is raised. Knows no
torch. Invariant: outside of `warnings_off`, and above the level of warnings, all is as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

ERRORS = 2  # c10's levels: 0 information, 1 warnings, 2 errors, 3 what ends the process


class _Off:
    """How many want it, and what the level was before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count, self.before = 0, 0


_off = _Off()


@contextlib.contextmanager
def warnings_off() -> Iterator[None]:
    """For the whole process. Does nothing where torch is not loaded, or has no such level."""
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
