"""Runs a script of a framework, alone or as ranks of a world, to its end, and reads what it said."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from support import TESTS
from support.processes.ranks import Ranks
from support.processes.warm_python import warm

HERE = TESTS / "adapters"  # where the programs are
SECONDS = 200  # for a run; importing a framework is most of it


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended, and what it printed. `codes`: by rank, or of the launcher alone."""

    codes: list[int]
    output: str

    @property
    def well(self) -> bool:
        return not any(self.codes)

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


MODULES = {
    "huggingface": ("transformers.trainer", "transformers.training_args", "everstep.train.adapters.huggingface"),
    "accelerate": ("accelerate", "accelerate.data_loader", "everstep.train.adapters.accelerate"),
    "lightning": ("lightning.pytorch", "everstep.train.adapters.lightning"),
}


def run(framework: str, ranks: int, *arguments: object) -> Ended:
    """In processes that begin warm; 0 ranks is one without a world."""
    with tempfile.NamedTemporaryFile("r") as output:
        argv = [HERE / f"run_{framework}.py", *arguments]
        started = Ranks(warm(*MODULES[framework]), ranks, argv, Path(output.name), environment())
        try:
            codes = started.wait(SECONDS)
        finally:
            started.kill()
        return Ended(codes, output.read())


def launch(framework: str, ranks: int, *arguments: object) -> Ended:
    """As a user does: by stock `torchrun`, and the framework is imported for each process."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.Popen(
        [sys.executable, *torchrun, str(HERE / f"run_{framework}.py"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
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
    return Ended([process.returncode], output)


def environment() -> dict[str, str]:
    drop = ("EVERSTEP_", "PET_", "RANK", "WORLD_SIZE", "ACCELERATE_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    return {**clean, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
