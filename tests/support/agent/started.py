"""One agent that is started and watched."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from support.processes.children import children

LIMIT = 60


class Started:
    """An agent in the background, whose processes wait."""

    def __init__(self, script: Path, body: str, *flags: str) -> None:
        write(script, f"import os, signal, sys, time\n{body}\nprint('up', flush=True)\ntime.sleep(100)\n")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "everstep.agent.main", "--nproc-per-node=2", *flags, str(script)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, **FAST},
        )  # fmt: skip
        assert self.process.stdout is not None
        assert [self.process.stdout.readline() for _ in range(2)] == ["up\n"] * 2

    def below(self) -> list[int]:
        """The fork server, and all that it forked."""
        warm = children(self.process.pid)
        return [*warm, *(pid for one in warm for pid in children(one))]

    def trainers(self) -> list[int]:
        (warm,) = children(self.process.pid)
        return children(warm)[1:]

    def end(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, said


def gone(pids: list[int], seconds: float = LIMIT) -> bool:
    def ended(pid: int) -> bool:
        try:
            return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return True

    deadline = time.monotonic() + seconds
    while not all(ended(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# Nothing here needs torch in the training process, and its import is the longest part.
FAST = {"EVERSTEP_PRELOAD": ""}


def write(script: Path, text: str) -> Path:
    script.parent.mkdir(exist_ok=True)
    script.write_text(text)
    return script
