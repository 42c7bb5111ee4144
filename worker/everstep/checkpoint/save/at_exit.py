"""Closes a run, and completes the saves in flight, when a script ends in order without having closed them.

A thread ends with the interpreter at any point, so a save in flight would be lost silently. A script that ends by an
error does not wait for its save: other processes wait for the script, and the commit before stays.

Invariant: after the script's own threads, and before those of executors, which write, are told to end.
"""

from __future__ import annotations

import atexit

# First: it ends its own threads, which write, when the interpreter ends; who registers later goes before it.
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
    """Of this process."""

    def __init__(self) -> None:
        self.process = 0
        self.open: dict[Closable, str] = {}  # with the URL of each
        # Of each URL: an older one is fenced by it, and by nobody else. Not held: a closed one has host memory.
        self.newest: dict[str, weakref.ref[Closable]] = {}
        self.error: object = None  # that the interpreter had told of when the newest save was made
        self.code = 0
        self.closed: list[Closable] = []  # at the script's end
        self.end_run: Callable[[], None] | None = None


_script = _Script()


def close(checkpointer: Closable, url: str) -> None:
    """When the script ends in order."""
    _watch()
    _script.open[checkpointer], _script.newest[url] = url, weakref.ref(checkpointer)


def end_run(end: Callable[[], None]) -> None:
    """Call this when the script ends in order, before checkpointers are closed. It raises what ends the process with
    another code than 0. A later call takes the place of the one before."""
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
    """Do nothing for this one."""
    _script.open.pop(checkpointer, None)


def forget_all() -> None:
    """As if their processes had died."""
    _script.open.clear()
    _script.newest.clear()
    _script.end_run = None


def late(checkpointer: Closable) -> str:
    """What is to be said of a save that comes after the script's end: of one in a function of `atexit`. Such an error
    ends nothing, so the exit code tells of it."""
    if _script.process != os.getpid() or checkpointer not in _script.closed:
        return ""
    _script.code = _script.code or 1
    return (
        ": the script has ended, and its last save is finished before the functions of atexit run. Save at the end of "
        "the script, not in a function of atexit"
    )


def saves() -> None:
    """An error that was told of before is not the one that the script ends by."""
    _script.error = getattr(sys, "last_value", None)


def _close_all() -> None:
    if _script.process != os.getpid() or not (_script.open or _script.end_run) or _failed():
        return
    for thread in threading.enumerate():  # as the interpreter does next; one of them may train
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
    """The process ends with this code, whatever the interpreter's own is. For functions of `atexit`."""
    _script.code, _script.process = code, os.getpid()


def _leave() -> None:
    """The interpreter's own exit code is settled by now. What the script has registered since runs before; what was
    registered before this module was imported is run here."""
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
        self._first, self._met = first, False

    def __eq__(self, other: object) -> bool:
        self._met = self._met or other is self._first
        return self._met

    __hash__ = None  # type: ignore[assignment]


atexit.register(_leave)
