"""Functions that a test runs in a process forked from its own, because they may die."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn


class Forked:
    """Call it with a function: it answers with the exit code of the process that ran it, or minus the signal that
    killed that process. What the function raises is printed, and is exit code 1."""

    def __init__(self) -> None:
        self._running: list[int] = []

    def __call__(self, body: Callable[[], object], timeout: float = 60.0) -> int:
        child = os.fork()
        if child == 0:
            end_with(body)
        self._running.append(child)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                self._running.remove(child)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        raise AssertionError(f"the child still runs after {timeout} s")

    def kill(self) -> None:
        """End those that outlived their limit."""
        for child in self._running:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def end_with(body: Callable[[], object]) -> NoReturn:
    """Run it in a process that was just forked, and end that with 0; with 1 if it raises."""
    code = 1
    # Garbage of the parent's may be a process group, whose end waits for a thread that is not in this process.
    gc.freeze()
    try:
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)  # the threads that OpenMP made do not live on in a child
        body()
        code = 0
    except BaseException:  # the child must not return into pytest
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
