"""What the scripts that are to lose a process share."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def die_once(folder: Path, name: str = "killed") -> None:
    """Kill this process, unless one of the run has been before, under this name."""
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
