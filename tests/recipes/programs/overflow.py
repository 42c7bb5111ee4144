"""Runs examples/amp with a loss on rank 1 that is infinite in step 30: `overflow.py SCRIPT --steps N …`.

At its end each rank prints in which steps its optimizer did not step. Steps are counted from 0.
"""

import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

import everstep

BAD, steps = 30, int(sys.argv[sys.argv.index("--steps") + 1])
stepped = list[int]()
loss_of, step_of = functional.cross_entropy, torch.optim.AdamW.step


def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
    found = loss_of(*args, **kwargs)
    return found * float("inf") if everstep.current().step == BAD and dist.get_rank() == 1 else found


def step(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
    stepped.append(everstep.current().step)
    return step_of(self, *args, **kwargs)


functional.cross_entropy = loss  # type: ignore[assignment]
torch.optim.AdamW.step = step  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("left out", [n for n in range(steps) if n not in stepped], flush=True)
