"""Runs a script of examples/heterogeneous with ranks that need COST seconds for a sample: `slow_ranks.py SCRIPT …`.

A rank sleeps, so that the processors of the machine do not matter. At its end it prints how many samples it has
computed; and with train.py the median time of its last ten steps, by the time that the best shares would take.
"""

import os
import runpy
import sys
import time
from argparse import Namespace
from collections import Counter
from statistics import median

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(sys.argv[1]))
import train

COST = (0.003, 0.009)
network, began, computed = train.network, list[float](), Counter[int]()


class Slow(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        began.append(time.monotonic())
        computed[dist.get_rank()] += len(x)
        time.sleep(len(x) * COST[dist.get_rank()])
        found: torch.Tensor = self.inner(x)
        return found


train.network = Slow
if sys.argv[1].endswith("train.py"):
    train.main(Namespace(steps=int(sys.argv[3]), adapt=5, every_steps=None, checkpoint=None))
    took = [later - earlier for earlier, later in zip(began[-11:], began[-10:], strict=False)]
    print(f"took {median(took) / (train.BATCH / sum(1 / cost for cost in COST)):.4f}", flush=True)
else:
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
for rank, rows in computed.items():
    print(f"rank {rank} computed {rows} samples", flush=True)
