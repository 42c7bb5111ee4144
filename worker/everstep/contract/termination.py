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
from pathlib import Path
from types import TracebackType

from everstep.contract import env, redact, refusal, refusal_output
from everstep.contract.library_files import frames_of_the_script

LOG = "/dev/termination-log"
MAX_ERROR = 1200  # characters: a refusal whole, with the line to write instead
MAX_BRIEF = 800  # of what a TrainingJob's status keeps: longer refusals may have a brief text of their own
MAX_RECORD = 1840  # characters of the error and of the lines before it, which get what the error leaves
MAX_LINES = 12
MAX_LINE = 120
FIRST_STEPS = 4  # after which most of what is compared between ranks was compared
MAX_CONTEXT, MAX_CUT = 100, 4096  # lines, and characters of one, that are looked at: a key has more lines than are kept
_RECORDED = "__everstep_told__"
# What a job's author can write where a container has no folder for temporary files.
MOUNT_TMP = (
    "mount an emptyDir at /tmp (volumes: [{name: tmp, emptyDir: {}}], volumeMounts: [{name: tmp, mountPath: /tmp}]), "
    "or let TMPDIR name a folder that can be written to"
)


def is_early(refused_after: object) -> bool:
    """Whether this is the number of steps that a refused script had made, as a file or a message tells it, and the
    script has made none but its first ones. Starting it again would end alike."""
    return isinstance(refused_after, int) and not isinstance(refused_after, bool) and 0 <= refused_after <= FIRST_STEPS


def write(
    error: str,
    exit_code: int,
    lines: list[str],
    environ: Mapping[str, str] = os.environ,
    *,
    refused_after: int | None = None,
    line: str = "",
) -> None:
    """Append one record. Several processes of one pod may write; the operator takes the first that blames no peer.

    Of a refusal (see `refusal.refused_after`), `line` is the place in the script.
    """
    if env.JOB_UID not in environ:
        return
    shown = redact.lines(line[:MAX_CUT] for line in lines[-MAX_CONTEXT:])
    short = redact.ends(error, MAX_ERROR)
    kept = min(MAX_LINES, (MAX_RECORD - len(short)) // MAX_LINE)
    record: dict[str, object] = {
        "everstep": 1,
        "rank": environ.get("RANK", ""),
        "exit_code": exit_code,
        "error": short,
        "lines": [line[:MAX_LINE] for line in shown[-kept:]],
    }
    if refused_after is not None:
        record["refused_after"] = refused_after
        record["line"] = redact.short(line, MAX_LINE)
    data = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    with contextlib.suppress(OSError):
        # Not created: outside a container there is no such file, and nobody would read one.
        fd = os.open(environ.get(env.TERMINATION_LOG, LOG), os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)


def write_error(error: BaseException) -> None:
    """The record of an exception, once; its `exit_code` attribute is used if it has one, else 1, as Python does.

    If a refusal led to it, the record is that of the refusal."""
    refused = refusal.find(error)
    reported = refused or error
    if getattr(error, _RECORDED, False) or getattr(reported, _RECORDED, False):
        return
    for raised in (error, reported):
        with contextlib.suppress(AttributeError):
            setattr(raised, _RECORDED, True)
    text = refusal.sentence(reported)
    if len(text) > MAX_BRIEF and (brief := getattr(reported, "everstep_brief", "")):
        text = f"{type(reported).__name__}: {brief}"
    lines = "".join(traceback.format_exception(error)).splitlines()
    write(
        text,
        int(getattr(error, "exit_code", 1)),
        [line for line in lines if line.strip()],
        refused_after=refusal.refused_after(error),
        line=_line_of_the_script(reported.__traceback__) or _line_of_the_script(error.__traceback__),
    )


def _line_of_the_script(trace: TracebackType | None) -> str:
    """`train.py:12`, the innermost line of the script; empty if there is none."""
    frames = frames_of_the_script(trace)
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""


def install() -> None:
    """Record an exception that ends the process, then do what was done with it before."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):
            if not isinstance(error, KeyboardInterrupt):
                write_error(error)
        with refusal_output.in_place_of_traceback(error):
            previous(kind, error, trace)

    sys.excepthook = hook
