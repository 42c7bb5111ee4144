"""The termination message of a training process, left where the kubelet picks it up.

torchrun ends with exit code 1 whatever its process ended with, and the last lines of a log show torchrun's own
traceback. One JSON line in the container's termination log tells the operator which error came first, and a person at
3 a.m. what it said. Standard library only. Invariants: nothing here raises; a process outside a TrainingJob writes
nothing; what is written is redacted and fits the kubelet's 4,096 bytes several times.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType

from everstep.contract import env, redact

LOG = "/dev/termination-log"
MAX_ERROR = 1200  # characters: a refusal whole, with the line to write instead
MAX_RECORD = 1840  # characters of the error and of the lines before it, which get what the error leaves
MAX_LINES = 12
MAX_LINE = 120
MAX_CONTEXT, MAX_CUT = 100, 4096  # lines, and characters of one, that are looked at: a key has more lines than are kept
_TOLD = "__everstep_told__"


def write(error: str, exit_code: int, lines: list[str], environ: Mapping[str, str] = os.environ) -> None:
    """Append one record. Several processes of one pod may write; the operator takes the first that blames no peer."""
    if env.JOB_UID not in environ:
        return
    shown = redact.lines(line[:MAX_CUT] for line in lines[-MAX_CONTEXT:])
    said = redact.short(error, MAX_ERROR)
    kept = min(MAX_LINES, (MAX_RECORD - len(said)) // MAX_LINE)
    record = {
        "everstep": 1,
        "rank": environ.get("RANK", ""),
        "exit_code": exit_code,
        "error": said,
        "lines": [line[:MAX_LINE] for line in shown[-kept:]],
    }
    data = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    with contextlib.suppress(OSError):
        # Not created: outside a container there is no such file, and nobody would read one.
        fd = os.open(environ.get(env.TERMINATION_LOG, LOG), os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)


def write_error(error: BaseException) -> None:
    """The record of an exception, once; its `exit_code` attribute is used if it has one, else 1, as Python does."""
    if getattr(error, _TOLD, False):
        return
    with contextlib.suppress(AttributeError):
        setattr(error, _TOLD, True)
    text = f"{type(error).__name__}: {error}"
    lines = "".join(traceback.format_exception(error)).splitlines()
    write(text, int(getattr(error, "exit_code", 1)), [line for line in lines if line.strip()])


def install() -> None:
    """Record an exception that ends the process, then do what was done with it before."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):
            if not isinstance(error, KeyboardInterrupt):
                write_error(error)
        previous(kind, error, trace)

    sys.excepthook = hook
