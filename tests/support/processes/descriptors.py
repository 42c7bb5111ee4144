"""What a process has open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def opened(pid: int | None = None) -> dict[str, str]:
    """By descriptor, the path or "socket:[inode]" behind it; of this process if none is named. Raises `OSError` for one
    that is gone."""
    found = {}
    for handle in Path(f"/proc/{pid or 'self'}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since it was listed
            found[handle.name] = os.readlink(handle)
    return found
