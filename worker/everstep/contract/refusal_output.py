"""Prints what a refusal says, once on each node, and without a traceback.

Most refusals are the same on all ranks. The first process of a node that has one prints it; each other process names
that rank in one line. Nodes do not know each other, so each node prints it once. The processes of a node share a folder
where their launcher lays out error files as torchrun does, `<folder>/attempt_<n>/<local rank>/error.json`; everstep-run
does. Elsewhere each process prints it.

Standard library only. Invariants: nothing here raises. A process prints before it takes a note, under a lock that ends
with the process, so a killed process takes no other one's text with it. A wait for that lock ends after `MOST_SECONDS`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from everstep.contract import env, error_file, rank_label, refusal
from everstep.contract.library_files import frames_of_the_script

MOST_SECONDS = 0.3  # for which a process waits for another one that prints
LOOK_SECONDS = 0.01
FRAMES = 2  # of the script, the innermost ones
_NOTES = "refusals"
_PRINTED = "__everstep_printed__"
_OF_A_LAUNCHER = re.compile(r"/attempt_\d+/\d+/[^/]+$")


def is_printed(refused: BaseException) -> bool:
    """Whether this process has printed this refusal."""
    return bool(getattr(refused, _PRINTED, False))


@contextlib.contextmanager
def in_place_of_traceback(error: BaseException) -> Iterator[None]:
    """If a refusal led to `error`, print the refusal, and leave out the traceback that the block prints. What else the
    block prints stays, because hooks of other libraries report errors too. Errors of more than a line, and of groups,
    keep their traceback, as all do with EVERSTEP_DEBUG."""
    refused = refusal.find(error)
    if refused is None or is_printed(refused):
        yield
        return
    remarks: list[str] | None = None
    with contextlib.suppress(Exception):  # an error whose text cannot be made
        remarks = _remarks(error, refused)
    show(refused, *(remarks or ()), trace_of=error)
    if remarks is None or os.environ.get(env.DEBUG):
        yield
        return
    tracebacks = {"".join(traceback.format_exception(error))}
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        yield
    tracebacks.add("".join(traceback.format_exception(error)))  # a hook may have left out frames
    rest = rank_label.removed(printed.getvalue())
    for text in sorted(tracebacks, key=len, reverse=True):
        rest = rest.replace(text, "")
    _write(rest)


def show(refused: BaseException, *remarks: str, trace_of: BaseException | None = None) -> None:
    """Print the refusal, the script's lines that led to it and the remarks; or one line, if another process of this
    node has printed the same. `trace_of`: its lines are printed if neither the refusal nor its cause has any."""
    with contextlib.suppress(AttributeError):
        setattr(refused, _PRINTED, True)
    traces = (frames_of_the_script(error.__traceback__) for error in (refused, refused.__cause__, trace_of) if error)
    frames = next(filter(None, traces), [])[-FRAMES:]
    lines = traceback.format_list([traceback.FrameSummary(*frame) for frame in frames])
    text = "".join(
        [f"everstep: refused: {refusal.sentence(refused)}\n", *lines, *(f"  {remark}\n" for remark in remarks)]
    )
    key = hashlib.sha256(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT')} {text}".encode()).hexdigest()
    with _notes() as notes:
        printed = dict(line.split(" ", 1) for line in notes if " " in line) if notes is not None else {}
        if (rank := printed.get(key)) is not None:
            _write(f"everstep: refused as rank {rank.strip()} is: {type(refused).__name__}\n")
            return
        _write(text)
        if notes is not None:
            with contextlib.suppress(OSError):
                notes.write(f"{key} {os.environ.get('RANK', '?')}\n")
                notes.flush()


def _remarks(error: BaseException, refused: BaseException) -> list[str] | None:
    """A line for each error that the refusal has led to or came from; None if they do not fit into lines."""
    remarks: list[str] = []
    link: BaseException | None = error
    verb = "the script ended with"
    while link is not None:
        if len(remarks) > refusal.MAX_ERRORS or isinstance(link, BaseExceptionGroup):
            return None
        if link is refused:
            verb = "it came from"
        elif str(link) not in refusal.sentence(refused):
            text = " ".join(traceback.format_exception_only(link)).strip().replace(str(refused), "…")
            if "\n" in text:
                return None
            at = "".join(
                f" ({Path(file).name}:{line})" for file, line, _ in frames_of_the_script(link.__traceback__)[-1:]
            )
            remarks.append(f"{verb} {text}{at}")
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return remarks if verb == "it came from" else None


@contextlib.contextmanager
def _notes() -> Iterator[IO[str] | None]:
    """The file of what processes of this node have printed, locked; None if there is none, or its lock is taken."""
    path = os.environ.get(error_file.PATH, "")
    if not _OF_A_LAUNCHER.search(path):
        yield None
        return
    with contextlib.ExitStack() as stack:
        notes: IO[str] | None = None
        with contextlib.suppress(OSError):
            notes = stack.enter_context((Path(path).parents[2] / _NOTES).open("a+"))
            notes.seek(0)
        yield notes if notes is not None and _locked(notes) else None


def _locked(notes: IO[str]) -> bool:
    end = time.monotonic() + MOST_SECONDS
    while True:
        try:
            fcntl.flock(notes, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_SECONDS)
        except OSError:
            return False


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the console is gone
        sys.stderr.write(rank_label.added(text))
        sys.stderr.flush()
