"""Programs at a terminal: what they show there and not in a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress


def on_terminal(*command: str, **environment: str) -> str:
    """The text that the command writes on stderr, if that is a terminal. Its stdout is a pipe."""
    screen, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=terminal,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment},
    ) as process:  # fmt: skip
        os.close(terminal)
        data = b""
        with suppress(OSError):  # the other end is closed
            while part := os.read(screen, 65536):
                data += part
        process.communicate(timeout=60)
    os.close(screen)
    assert process.returncode == 0, data
    return data.decode()
