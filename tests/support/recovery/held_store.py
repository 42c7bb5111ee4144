"""A store whose calls wait while a file says so: what it takes to be killed or stopped in the middle of one.

Each line of the file is a pid and a pattern; that process's calls which the pattern fits (`"put data/…"`) wait until
the line is gone. A process that waits leaves a file that says so, and another when that call has ended.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from everstep.storage import ObjectStore
from everstep.storage.faults import FaultStore

T = TypeVar("T")


class HeldStore(FaultStore):
    """`inner`, held by the lines of `file`."""

    def __init__(self, inner: ObjectStore, file: Path) -> None:
        super().__init__(inner)
        self._file = file

    def call(self, operation: str, name: str, act: Callable[[], T], tear: Callable[[], None] = lambda: None) -> T:
        if not self._held(f"{operation} {name}"):
            return act()
        self._file.with_name(f"waits-{os.getpid()}").touch()
        while self._held(f"{operation} {name}"):
            time.sleep(0.01)
        try:
            return act()
        finally:
            self._file.with_name(f"went-{os.getpid()}").touch()

    def _held(self, call: str) -> bool:
        try:
            lines = self._file.read_text().splitlines()
        except FileNotFoundError:
            return False
        said = (line.partition(" ") for line in lines)
        return any(pid == str(os.getpid()) and re.match(pattern, call) for pid, _, pattern in said)


class Hold:
    """The test's end: which calls wait."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "hold"

    def set(self, *held: tuple[int, str]) -> None:
        """These calls wait from now on, and no others."""
        written = self.file.with_suffix(".new")
        written.write_text("".join(f"{pid} {pattern}\n" for pid, pattern in held))
        written.replace(self.file)

    def waits(self, pid: int) -> bool:
        """Whether this process has come to a call that waits."""
        return self.file.with_name(f"waits-{pid}").exists()

    def went(self, pid: int) -> bool:
        """Whether a call of this process has waited, and has ended, well or not."""
        return self.file.with_name(f"went-{pid}").exists()


def held_checkpointer(url: str, file: str, **options: Any) -> Any:
    """A Checkpointer over a folder whose calls can be held."""
    from everstep.checkpoint import Checkpointer  # noqa: PLC0415  imports torch
    from everstep.storage import open_store  # noqa: PLC0415

    return Checkpointer(store=HeldStore(open_store(url), Path(file)), **options)
