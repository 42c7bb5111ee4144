"""In a training process of a rehearsal: keeps what rank 0 prints in the loop, each line with its step.

Of a step that is taken again the last taking counts (`written.read_printed`): what a restart prints once more is no
difference.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from everstep.rehearse.watch import Watch
from everstep.rehearse.written import as_shown

MOST_LINES = 20_000  # of one process
MOST_CHARACTERS = 1000  # of one line


def log_apart() -> None:
    """Everstep's log goes to stderr alone in this process: in a file of the script's, or on its stdout, its lines would
    be taken for the script's, and a loss brings some more."""
    ours = logging.getLogger("everstep")
    ours.addHandler(logging.StreamHandler(sys.stderr))
    ours.propagate = False


class Output:
    """Stands for `sys.stdout`, and is it in all but `write`."""

    def __init__(self, watch: Watch, folder: Path) -> None:
        self._stream, self._run = sys.stdout, str(folder)
        self._out = (folder / f"printed-{os.getpid()}.jsonl").open("a")
        self._line, self._left = "", MOST_LINES
        self._in_loop = False
        watch.on_enter.append(self._begins)
        watch.on_evaluation.append(self._evaluates)

    def install(self) -> None:
        """Take the place of this process's `sys.stdout`."""
        sys.stdout = self

    def write(self, text: str) -> int:
        if self._in_loop:
            *lines, self._line = (self._line + text).split("\n")
            for line in lines:
                self._note(text=as_shown(line).replace(self._run, "")[:MOST_CHARACTERS])
            self._line = self._line[-MOST_CHARACTERS:]
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _begins(self, step: int, rank: int) -> None:
        """The step after so many begins in this process."""
        self._in_loop = rank == 0
        if self._in_loop:
            self._note(step=step, at=time.time())

    def _evaluates(self, begins: bool) -> None:
        if self._in_loop:
            self._note(evaluates=begins)

    def _note(self, **values: object) -> None:
        if self._left > 0:
            self._left -= 1
            self._out.write(json.dumps(values) + "\n")
            self._out.flush()  # the process may be killed at any place
