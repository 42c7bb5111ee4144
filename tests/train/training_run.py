"""Runs the training script as a user does: under `python`, or under stock `torchrun`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("script.py")
DONE = re.compile(r"done step=(\d+) parameters=(\w+)")


@dataclass
class Ended:
    """How a run ended, and what it printed."""

    code: int
    output: str

    @property
    def parameters(self) -> str:
        found = DONE.search(self.output)
        assert found is not None, self.output[-3000:]
        return found[2]

    @property
    def values(self) -> list[float]:
        line = next(line for line in self.output.splitlines() if line.startswith("values="))
        found: list[float] = json.loads(line.removeprefix("values="))
        return found

    @property
    def starts(self) -> list[int]:
        return [int(n) for n in re.findall(r"start step=(\d+) rank=0", self.output)]


class Started:
    """A run that goes on. `processes` are the training processes, by rank."""

    def __init__(self, ranks: int, arguments: list[str], output: Path, environment: dict[str, str]) -> None:
        launcher = (
            [sys.executable, "-u"]
            if ranks == 0
            else [sys.executable, "-u", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        )
        self.output = output
        self.mark = f"EVERSTEP_TEST_RUN={uuid.uuid4().hex}"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("EVERSTEP_", "PET_", "RANK", "WORLD_SIZE"))}
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [*launcher, str(SCRIPT), *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**clean, **environment, **dict([self.mark.split("=")])},
                start_new_session=True,
            )

    def kill(self) -> None:
        """End whatever is left of it: torchrun's processes live on when it is killed."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and self.mark.encode() in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), 9)
        self.process.wait(10)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, what: str, probe: Callable[[str], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not probe(self.text()):
            assert self.process.poll() is None, f"ended before {what}\n{self.text()}"
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.text()}"
            time.sleep(0.05)

    def pids(self) -> dict[int, int]:
        return {int(r): int(p) for r, p in re.findall(r"start step=\d+ rank=(\d+) world=\d+ pid=(\d+)", self.text())}

    def end(self, seconds: float = 100) -> Ended:
        code = self.process.wait(seconds)
        return Ended(code, self.text())


Start = Callable[..., Started]
