"""Closes a run, and completes the saves in flight, when a script ends in order without having closed them.

A thread ends with the interpreter at any point, so a save in flight would be lost silently. A script that ends by an
error does not wait for its save: other processes wait for the script, and the commit before stays.

Invariant: this runs after the script's own threads, and before the threads of executors, which write, have to end.
"""

from __future__ import annotations

import atexit

# Imported first: it ends its threads, which write, when the interpreter ends. What is registered later runs earlier.
import concurrent.futures.thread
import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from everstep.checkpoint.errors import Fenced
from everstep.contract.script_end import ScriptEnd

log = logging.getLogger("everstep.checkpoint")


class Closable(Protocol):
    def close(self) -> None: ...


class _Script:
    """The state of this module in this process."""

    def __init__(self) -> None:
        self.process = 0
        self.open: dict[Closable, str] = {}  # Checkpointer → its URL
        # By URL: the newest Checkpointer, which fences the older ones. A weak reference, because a closed one still
        # has host memory.
        self.newest: dict[str, weakref.ref[Closable]] = {}
        self.error: object = None  # the last error that the interpreter had shown when the newest save was made
        self.code = 0
        self.closed: list[Closable] = []  # those that were closed at the script's end
        self.end_run: Callable[[], None] | None = None


_script = _Script()


def close(checkpointer: Closable, url: str) -> None:
    """Close this one when the script ends in order."""
    _watch()
    _script.open[checkpointer], _script.newest[url] = url, weakref.ref(checkpointer)


def end_run(end: Callable[[], None]) -> None:
    """Call `end` when the script ends in order, before checkpointers are closed. If it raises, the process ends with
    another exit code than 0. A later call replaces an earlier one."""
    _watch()
    saves()
    _script.end_run = end


def _watch() -> None:
    if _script.process == os.getpid():
        return
    # A forked child has none of its parent's saves.
    if _script.process == 0:
        threading._register_atexit(_close_all)  # type: ignore[attr-defined]
    _script.process, _script.open, _script.newest = os.getpid(), {}, {}
    _script.closed, _script.end_run = [], None


def forget(checkpointer: Closable) -> None:
    """Do not close this one at the script's end."""
    _script.open.pop(checkpointer, None)


def forget_all() -> None:
    """Close nothing at the script's end."""
    _script.open.clear()
    _script.newest.clear()
    _script.end_run = None


def late(checkpointer: Closable) -> str:
    """The end of the error's text for a save after the script's end, in a function of `atexit`; else "". An error there
    ends nothing, so this sets the exit code."""
    if _script.process != os.getpid() or checkpointer not in _script.closed:
        return ""
    _script.code = _script.code or 1
    return (
        ": the script has ended, and its last save is finished before the functions of atexit run. Save at the end of "
        "the script, not in a function of atexit"
    )


def saves() -> None:
    """A save is made: an error that the interpreter has shown before it is not the one that ends the script."""
    _script.error = getattr(sys, "last_value", None)


def _close_all() -> None:
    if _script.process != os.getpid() or not (_script.open or _script.end_run) or _failed():
        return
    for thread in threading.enumerate():  # the interpreter would wait for them next; one of them may train
        of_executor = thread in concurrent.futures.thread._threads_queues
        if not (thread.daemon or of_executor or thread in (threading.main_thread(), threading.current_thread())):
            thread.join()
    if _script.end_run is not None and not ScriptEnd.failed:
        try:
            _script.end_run()
        except SystemExit as e:
            _script.code = e.code if isinstance(e.code, int) else 1
        except Exception as e:
            _script.code = getattr(e, "exit_code", 1)
            sys.excepthook(type(e), e, e.__traceback__)
    for checkpointer, url in list(_script.open.items()):
        try:
            _script.closed.append(checkpointer)
            checkpointer.close()
        except Exception as e:
            newest = _script.newest.get(url)
            if isinstance(e, Fenced) and (newest is None or newest() is not checkpointer):
                log.warning(
                    "an older Checkpointer of this process is not closed: a newer one has taken its log, and what it "
                    "saved since is not committed: %s", e
                )  # fmt: skip
                continue
            _script.code = getattr(e, "exit_code", 1)
            log.exception("the script has ended, and its last save failed")


def _failed() -> bool:
    """Whether the script ends by an error."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_bootstrap" and frame.f_globals.get("__name__") == "multiprocessing.process":
            return frame.f_locals.get("exitcode") != 0
    return getattr(sys, "last_value", None) is not _script.error


def end_with(code: int) -> None:
    """End the process with this code instead of the interpreter's. For functions of `atexit`."""
    _script.code, _script.process = code, os.getpid()


def _leave() -> None:
    """End the process with `_script.code`: the interpreter's own exit code can no longer be changed here. Functions
    registered after this module was imported have run already. Those registered before are run here."""
    if not _script.code or _script.process != os.getpid():
        return
    with contextlib.suppress(Exception):
        atexit.unregister(_From(_leave))  # type: ignore[arg-type]  # it is compared, not called
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(_script.code)


class _From:
    """Equal to `first` and to all functions that are compared with it afterwards. `atexit.unregister` compares its
    functions in the order in which they were registered, so those remain that have not run yet."""

    def __init__(self, first: object) -> None:
        self._first, self._matched = first, False

    def __eq__(self, other: object) -> bool:
        self._matched = self._matched or other is self._first
        return self._matched

    __hash__ = None  # type: ignore[assignment]


atexit.register(_leave)
