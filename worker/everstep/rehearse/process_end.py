"""Ends a process of a rehearsal as the interpreter does, but for its last act: to take apart all that is imported. With
torch that takes 0.4 s of a processor."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
from typing import NoReturn


def end(code: int = 0) -> NoReturn:
    """Wait for threads, call what is registered, and write what is buffered in files that are still open."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (*(one for one in gc.get_objects() if type(one) in (io.TextIOWrapper, io.BufferedWriter)),
                 sys.stdout, sys.stderr):  # fmt: skip
        with contextlib.suppress(OSError, ValueError):  # it is closed
            file.flush()
    os._exit(code)
