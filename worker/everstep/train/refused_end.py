"""Ends a process whose run was refused as one that was refused, although its script has caught the error.

A script may catch every error and print it. Its process would end with exit code 0, and its job as a success that was
none. Invariant: a run that is complete, of the same process and begun later, takes the refusal back.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Iterator

from everstep.checkpoint.save import at_exit
from everstep.contract import error_file, refusal, termination


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """The block is part of a run: a refusal that ends it stands until a run is complete."""
    try:
        yield
    except (Exception, SystemExit) as e:
        remember(e)
        raise


def remember(error: BaseException | None) -> None:
    if error is not None and refusal.find(error) is not None:
        refusal.stands(error)


@atexit.register
def _tell() -> None:
    refused = refusal.standing()
    if refused is None:
        return
    at_exit.end_with(1)
    with contextlib.suppress(Exception):
        error_file.write(refused)
    termination.write_error(refused)
    if refusal.is_printed(refused):
        return
    with refusal.framed(refused):
        sys.stderr.write("the script has caught this refusal, and ends although its run is not complete\n")
