"""Ends a process whose run was refused as one that was refused, although its script has caught the error.

A script may catch every error and print it. Its process would end with exit code 0, and its job as a success that was
none. Invariant: a run that is complete, of the same process and begun later, takes the refusal back.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator

from everstep.checkpoint.save import at_exit
from everstep.contract import error_file, refusal, refusal_output, termination
from everstep.recovery.announcements import run_complete


class _Process:
    """Of this process; a forked child has the refusal of its parent, which is none of its own."""

    refused: BaseException | None = None
    pid = 0
    complete = False  # a run of this process


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """The block is part of a run: a refusal that ends it stands until a run is complete."""
    try:
        yield
    except (Exception, SystemExit) as e:
        stands(e)
        raise


def stands(error: BaseException | None) -> None:
    """This error has ended the run, or a part of it. If it is a refusal, it stands until a run is complete."""
    if error is not None and (refused := refusal.find(error)) is not None:
        _Process.refused, _Process.pid = refused, os.getpid()


def is_refused() -> bool:
    """Whether a refusal of this process stands."""
    return _Process.refused is not None and _Process.pid == os.getpid()


def completed() -> None:
    """A run of this process is complete."""
    _Process.refused, _Process.complete = None, True
    run_complete()


def _watch_threads() -> None:
    """The interpreter prints an error that ends a thread, and goes on. A refusal among them stands as others do, unless
    a run is complete already: then the thread does something beside the training."""
    previous = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or isinstance(args.exc_value, SystemExit) or _Process.complete:
            previous(args)
            return
        stands(args.exc_value)
        with refusal_output.in_place_of_traceback(args.exc_value):
            previous(args)

    threading.excepthook = hook


_watch_threads()


@atexit.register
def _tell() -> None:
    refused = _Process.refused
    if refused is None or not is_refused():
        return
    at_exit.end_with(1)
    with contextlib.suppress(Exception):
        error_file.write(refused)
    termination.write_error(refused)
    if not refusal_output.is_printed(refused):
        refusal_output.show(refused, "the script has caught it, and ends although its run is not complete")
