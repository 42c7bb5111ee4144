"""Checks that the program can be started, before the agent joins a round.

An agent that joined and then found no script would break the round for all others, again and again. Invariant: no code
of the program runs here. Problems that show only when it runs are left to its process.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass

from everstep import installing
from everstep.agent.arguments import Program
from everstep.contract.termination import MOUNT_TMP

NOT_READABLE, NO_MODULE, NOT_EXECUTABLE, NOT_FOUND = 2, 1, 126, 127  # the exit codes of Python and shells


@dataclass(frozen=True, slots=True)
class CannotStart:
    """The reason, in the words of Python or a shell, and their exit code for it."""

    code: int
    why: str


def problem(program: Program) -> CannotStart | None:
    """Why the program cannot be started in this folder; None if no reason is known."""
    try:
        tempfile.gettempdir()  # of the agent's socket, and of most programs
    except OSError:  # a container with `readOnlyRootFilesystem`
        return CannotStart(NOT_EXECUTABLE, f"no folder for temporary files can be written to: {MOUNT_TMP}")
    if program.module:
        return _module(program.target)
    if program.executable:
        return _executable(program.target)
    path = os.path.abspath(program.target)
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as e:
        return CannotStart(NOT_READABLE, f"can't open file {path!r}: {e.strerror}")
    return None


def _module(name: str) -> CannotStart | None:
    """Look for the top package only: a search inside it would import it."""
    package, _, _ = name.partition(".")
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        installed = importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return None  # an error of an installed finder, or a module without a spec; the process will show it
    finally:
        sys.path[:] = before
    remedy = f": {installing.remedy('everstep-horovod')}" if package == "everstep_horovod" else ""
    return None if installed else CannotStart(NO_MODULE, f"No module named {package!r}{remedy}")


def _executable(name: str) -> CannotStart | None:
    if shutil.which(name) is not None:
        return None
    if os.path.dirname(name) and os.path.exists(name):
        kind = errno.EISDIR if os.path.isdir(name) else errno.EACCES
        return CannotStart(NOT_EXECUTABLE, f"can't run {name!r}: {os.strerror(kind)}")
    return CannotStart(NOT_FOUND, f"can't run {name!r}: {os.strerror(errno.ENOENT)}: command not found")
