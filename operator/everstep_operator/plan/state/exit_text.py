"""Reads a termination message: which lines are the program's own, and which of them names the error.

Invariant: the message is untrusted text, so the patterns look at bounded lines only.
"""

from __future__ import annotations

import re

from everstep.contract.termination import MOUNT_TMP

NOT_EXECUTABLE, NOT_FOUND = 126, 127  # exit codes of shells and launchers

# The first line of torchrun itself, after those of the program.
_TORCHRUN = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] failed \(exitcode: ")
_LAUNCHER = re.compile(r"\[?[WEIF]\d{4} [\d:.]+ |[\d:.]+ everstep-run: |\{\"everstep\"")
_RANK = re.compile(r"\[rank\d{1,6}\]:\s*")
_ERROR = re.compile(
    r"(?:[\w.]{1,100}(?:Error|Exception|Exit|Interrupt)|.{0,200}: error|.{0,200}can't open file|"
    r".{0,200}: No module named)\b"
)
# Of Python's tempfile: torchrun makes a folder of that kind before any code of ours runs.
_NO_TEMPORARY_FOLDER = "No usable temporary directory found"
_CANNOT = re.compile(
    rf"FileNotFoundError: .{{0,20}}{_NO_TEMPORARY_FOLDER}|"
    r"can't (?:open|run) .{0,400}(?:No such file|Permission denied|Is a directory)|No module named|"
    r"(?:^|: )(?:ModuleNotFound|Import|Syntax|Indentation|Tab|Name)Error\b|"
    r"unrecognized arguments|arguments are required|invalid choice|expected (?:one|at least one) argument|"
    r"executable file not found|command not found|[Ee]xec format error|"
    r"\bexec:? [\"/].{0,400}(?:no such file or directory|permission denied|is a directory)"
)


def own_lines(message: str) -> list[str]:
    """The lines that the program wrote itself, without the launcher's lines at the end of a log."""
    lines = message.splitlines()
    end = next((i for i, line in enumerate(lines) if _TORCHRUN.search(line[:300])), None)
    return [line for line in lines[:end] if line.strip() and not _LAUNCHER.match(line)]


def error_line(lines: list[str] | tuple[str, ...]) -> str:
    """The last line that names an error; empty if none does."""
    stripped = (_RANK.sub("", line.strip(), count=1) for line in reversed(lines))
    return next((line for line in stripped if _ERROR.match(line[:300])), "")


def with_remedy(error: str) -> str:
    """The line of an error, and what to write in the job if the line does not say it."""
    return f"{error}: {MOUNT_TMP}" if _NO_TEMPORARY_FOLDER in error else error


def cannot_start(code: int, text: str) -> bool:
    """Whether the program would fail again in the same way: it does not exist, cannot be run or read, or lacks a module
    or a folder for temporary files."""
    return code in (NOT_EXECUTABLE, NOT_FOUND) or _CANNOT.search(text[:1000]) is not None
