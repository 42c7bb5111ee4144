"""What a script's checkpointers still have to save when it ends in order, without having closed them.

A thread is ended with the interpreter wherever it is, so a save in flight would be lost without a word. A script that
ends by an error does not wait for it: others wait for the script, and the commit before stays.
"""

from __future__ import annotations

# First: it ends its own threads, which write, when the interpreter ends; who registers later goes before it.
import concurrent.futures.thread  # noqa: F401
import logging
import os
import sys
import threading
from typing import Protocol

log = logging.getLogger("everstep.checkpoint")


class Closable(Protocol):
    def close(self) -> None: ...


_open: set[Closable] = set()
_process = 0


def close(checkpointer: Closable) -> None:
    """When the script ends in order."""
    global _process  # noqa: PLW0603  one a process: a forked child has none of its parent's saves
    if _process != os.getpid():
        if _process == 0:
            # Before the interpreter waits for threads, after which none can be started; atexit's come later.
            threading._register_atexit(_close_all)  # type: ignore[attr-defined]
        _open.clear()
        _process = os.getpid()
    _open.add(checkpointer)


def forget(checkpointer: Closable) -> None:
    """Do nothing for this one."""
    _open.discard(checkpointer)


def _close_all() -> None:
    failed = hasattr(sys, "last_type") and not hasattr(sys, "ps1")  # set when the interpreter has told of an error
    if _process != os.getpid() or failed:
        return
    problem: BaseException | None = None
    for checkpointer in list(_open):
        try:
            checkpointer.close()
        except Exception as e:
            problem = e
            log.exception("the script has ended, and its last save came to nothing")
    if problem is not None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(getattr(problem, "exit_code", 1))  # the interpreter's own exit code is settled by now
