"""The builds of all lanes of a run, in one process of low priority, while tests that need none of them run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

POLL = 0.2  # seconds
LIMIT = 3600.0  # seconds for what one lane waits for
END_LIMIT = 20.0  # seconds for the process to end by itself
PROGRAM = (sys.executable, "-m", "testcluster.builds")


class Background:
    """Builds `names` in this order; record and log are in `folder`. `program` gets the record's path and `names`."""

    def __init__(self, names: Sequence[str], folder: Path, program: Sequence[str] = PROGRAM) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._record, self._log = folder / "builds.jsonl", folder / "builds.log"
        self._record.unlink(missing_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        if names:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [*program, str(self._record), *names],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip

    def _ended(self) -> dict[str, str]:
        """Build → its problem. A last line without its end is still being written."""
        text = self._record.read_text() if self._record.exists() else ""
        lines = (json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n"))
        return {line["build"]: line["problem"] for line in lines}

    def wait(self, names: Sequence[str], say: Callable[[str], None], limit: float = LIMIT) -> str:
        """Wait until `names` are built; why one of them is not, or "". `limit` is in seconds.

        Where the process ended without a word about one of them, the tests build it themselves before they begin.
        """
        began, announced = time.monotonic(), False
        while True:
            runs = self._process is not None and self._process.poll() is None
            ended = self._ended()
            problems = [f"{name} could not be built: {ended[name]}" for name in names if ended.get(name)]
            if problems:
                return f"{'; '.join(problems)}\nlog: {self._log}"
            left = [name for name in names if name not in ended]
            if not left:
                if announced:
                    say(f"waited {time.monotonic() - began:.0f} s for builds")
                return ""
            if not runs:
                say(f"the builds ended without {', '.join(left)}, see {self._log}; built before the lane's first test")
                return ""
            if time.monotonic() - began > limit:
                return f"{', '.join(left)} was not built within {limit:.0f} s\nlog: {self._log}"
            if not announced:
                say(f"waits for {', '.join(left)}")
                announced = True
            time.sleep(POLL)

    def stop(self) -> None:
        """End the process and what it started. What it was at is built anew by the next run."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_LIMIT)
                return
