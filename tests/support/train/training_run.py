"""Runs the training script: alone or as ranks of a world, begun warm; or as a user does, by `python` or `torchrun`."""

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

from support import TESTS
from support.processes.ranks import Ranks
from support.processes.warm_python import warm

SCRIPT = TESTS / "train" / "script.py"
DONE = re.compile(r"done step=(\d+) parameters=(\w+)")


@dataclass
class Ended:
    """How a run ended, and what it printed. `codes`: by rank, or of the launcher alone."""

    codes: list[int]
    output: str

    @property
    def well(self) -> bool:
        return not any(self.codes)

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
    """A run that goes on, of `ranks` processes; 0 is one without a world."""

    def __init__(self, ranks: int, arguments: list[str], output: Path) -> None:
        self.output = output
        output.touch()
        self._ranks = Ranks(warm(), ranks, [SCRIPT, *arguments], output, environment())

    @property
    def group(self) -> int:
        """The process group of rank 0 and what it started."""
        return self._ranks.pids[0]

    def running(self) -> bool:
        return self._ranks.poll() is None

    def kill(self) -> None:
        self._ranks.kill()

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, what: str, probe: Callable[[str], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not probe(self.text()):
            assert self.running(), f"ended before {what}\n{self.text()}"
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.text()}"
            time.sleep(0.05)

    def pids(self) -> dict[int, int]:
        return {int(r): int(p) for r, p in re.findall(r"start step=\d+ rank=(\d+) world=\d+ pid=(\d+)", self.text())}

    def end(self, seconds: float = 100) -> Ended:
        return Ended(self._ranks.wait(seconds), self.text())


class Launched(Started):
    """The same by `python`, or by stock `torchrun`: what it imports is imported for each."""

    def __init__(self, ranks: int, arguments: list[str], output: Path) -> None:
        self.output = output
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
        self.mark = f"EVERSTEP_TEST_RUN={uuid.uuid4().hex}"
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-u", *torchrun, str(SCRIPT), *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**environment(), **dict([self.mark.split("=")])},
                start_new_session=True,
            )

    @property
    def group(self) -> int:
        return self.process.pid

    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """End whatever is left of it: torchrun's processes live on when it is killed."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and self.mark.encode() in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), 9)
        self.process.wait(10)

    def end(self, seconds: float = 100) -> Ended:
        return Ended([self.process.wait(seconds)], self.text())


def environment() -> dict[str, str]:
    """Ours, without what would make it part of some other job."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("EVERSTEP_", "PET_", "RANK", "WORLD_SIZE"))}


Start = Callable[..., Started]
