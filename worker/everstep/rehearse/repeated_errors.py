"""Finds in the log of a run the error that ends each start of a rank, so that the run need not go through all restarts.

The agent writes a line when a process ends by itself, by whatever: an exception, an exit code, a crash.
"""

from __future__ import annotations

import re
from pathlib import Path

_END = re.compile(r"\S+ everstep-run: rank (\d+) \(local rank \d+, pid \d+\): (.+)")
_AGENT = re.compile(r"\S+ everstep-run: ")
_KILLED = ("SIGKILL", "SIGTERM")
_CODE = re.compile(r"exit code \d+")
_CHANGING = re.compile(r"\S*\d\S*")  # a time, an address, a port: another in each start
MOST_CHARACTERS = 300


class RepeatedErrors:
    """Of one run, whose log grows."""

    def __init__(self, log: Path) -> None:
        self._log, self._read = log, 0
        self._errors: dict[str, str] = {}  # by rank, since the last kill: the form of its last error
        self._printed = ""  # the last line that is not the agent's
        self.first = ""  # the first error that has ended a rank twice with no kill in between, or ""

    def look(self) -> str:
        """Read what is new in the log. Returns `first`."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(end)
        for line in whole.decode(errors="replace").splitlines():
            self._next(line)
        return self.first

    def pop(self) -> str:
        """`look`, and forget it: all processes have ended, and those of another size begin."""
        self.look()
        first, self.first = self.first, ""
        self._errors.clear()
        return first

    def _next(self, line: str) -> None:
        ended = _END.fullmatch(line)
        if ended is None:
            self._printed = self._printed if not line.strip() or _AGENT.match(line) else line.strip()
            return
        rank, text = ended.groups()
        if text in _KILLED:
            self._errors.clear()
            return
        code = _CODE.match(text)
        form = (code[0] if code is not None else "") + _CHANGING.sub("#", text)
        if self._errors.get(rank) == form and not self.first:
            # An exit code alone says little; what was printed before it may say why.
            more = f", behind the line: {self._printed}" if code is not None and code[0] == text else ""
            self.first = f"{text}{more}"[:MOST_CHARACTERS]
        self._errors[rank] = form
