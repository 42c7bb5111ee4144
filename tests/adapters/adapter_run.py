"""Runs a script of a framework under `python` (0 ranks) or stock `torchrun`, to its end, and reads what it said."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SECONDS = 200  # for a run; importing a framework is most of it


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended, and what it printed."""

    code: int
    output: str

    @property
    def done(self) -> tuple[int, str]:
        """The last step and the parameters' checksum."""
        found = re.search(r"done step=(\d+) parameters=(\w+)", self.output)
        assert found is not None, self.output[-4000:]
        return int(found[1]), found[2]

    @property
    def began(self) -> int:
        """The first step of rank 0."""
        found = re.search(r"start step=(\d+) rank=0", self.output)
        assert found is not None, self.output[-4000:]
        return int(found[1])


def run(framework: str, ranks: int, *arguments: object) -> Ended:
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    drop = ("EVERSTEP_", "PET_", "RANK", "WORLD_SIZE", "ACCELERATE_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    process = subprocess.Popen(
        [*launcher, str(HERE / f"run_{framework}.py"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**clean, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its processes, which are in sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    return Ended(process.returncode, output)
