"""Which save of a process is no commit yet, in a small file that its agent reads when the process has ended.

A process that ends by `os._exit` runs nothing more, so only its agent can say that it took a save along. Standard
library only. Invariants: nothing here raises; each process has a file of its own, as a child has its parent's
environment; without an agent nothing is written.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from everstep.contract import env, error_file

MAX_TEXT = 400


class _Process:
    """Of this process. `saves`: for each save that is no commit, what became of it."""

    lock = threading.RLock()  # a handler of signals may save within a save
    saves: ClassVar[dict[int, str]] = {}
    pid = 0


def note(save: object, text: str, environ: Mapping[str, str] = os.environ) -> None:
    """This save is no commit: `text` says what it is. It takes the place of what was noted of it before."""
    _change(id(save), text, environ)


def forget(save: object, environ: Mapping[str, str] = os.environ) -> None:
    """It is one, or its script knows that it is none."""
    _change(id(save), "", environ)


def read(folder: Path, pid: int) -> str:
    """What the ended process of this pid had noted last and not taken back; empty if there is nothing."""
    try:
        return " ".join(_path(folder, pid).read_text()[:MAX_TEXT].split())
    except (OSError, ValueError):
        return ""


def _change(key: int, text: str, environ: Mapping[str, str]) -> None:
    path = environ.get(error_file.PATH)
    if not path or env.AGENT_SOCKET not in environ:
        return
    with _Process.lock, contextlib.suppress(OSError):
        if _Process.pid != os.getpid():  # a forked child has none of its parent's saves
            _Process.pid, _Process.saves = os.getpid(), {}
        if text:
            _Process.saves[key] = text
        elif _Process.saves.pop(key, None) is None:
            return
        mine = _path(Path(path).parent, os.getpid())
        if _Process.saves:
            mine.write_text(list(_Process.saves.values())[-1])
        else:
            mine.unlink()


def _path(folder: Path, pid: int) -> Path:
    return folder / f"unsaved-{pid}"
