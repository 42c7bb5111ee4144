"""Shared by the scripts of `benchmarks/adapters.py`: each optimizer step is written down, and rank 1 is killed once.

`FOLDER` is the script's first argument. `FOLDER/steps` has a line a step: seconds of the machine's clock, pid, and the
number of the optimizer's step, which a new process takes over with its state.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import Dataset

FOLDER, LIBRARY_ALONE = Path(sys.argv[1]), sys.argv[2] == "stock"
SAMPLES, BATCH, KILLED = 120, 4, 4  # 10 steps of three ranks; rank 1 dies in its fifth


class Points(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def watch() -> None:
    """From now on."""
    torch.set_num_threads(1)
    taken = [0]

    def before(*_: Any) -> None:
        if dist.get_rank() != 1 or taken[0] != KILLED or (FOLDER / "killed").exists():
            return
        (FOLDER / "killed.part").write_text(str(time.monotonic()))
        os.rename(FOLDER / "killed.part", FOLDER / "killed")
        os.kill(os.getpid(), signal.SIGKILL)

    def behind(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        taken[0] += 1
        number = max(int(state["step"]) for state in optimizer.state.values())
        with (FOLDER / "steps").open("a") as file:
            file.write(f"{time.monotonic()} {os.getpid()} {number}\n")

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(behind)
