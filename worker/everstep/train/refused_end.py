"""Ends a process whose run was refused as one that was refused, although its script has caught the error.

A script may catch every error and print it. Its process would end with exit code 0, and its job as a success that was
none. Invariant: a run that is complete, of the same process and begun later, takes the refusal back.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator

from everstep.checkpoint.save import at_exit
from everstep.contract import error_file, refusal, termination


class _Process:
    """Of this process; a forked child has the refusal of its parent, which is none of its own."""

    refused: BaseException | None = None
    pid = 0


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


def settled() -> None:
    """A run of this process is complete."""
    _Process.refused = None


@atexit.register
def _tell() -> None:
    refused = _Process.refused
    if refused is None or _Process.pid != os.getpid():
        return
    at_exit.end_with(1)
    with contextlib.suppress(Exception):
        error_file.write(refused)
    termination.write_error(refused)
    if refusal.is_printed(refused):
        return
    with refusal.framed(refused):
        sys.stderr.write("the script has caught this refusal, and ends although its run is not complete\n")
