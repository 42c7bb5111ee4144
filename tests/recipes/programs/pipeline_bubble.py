"""How long examples/pipeline's ranks do nothing, where each part takes SECONDS forward and SECONDS backward.

    everstep-run … pipeline_bubble.py SCRIPT MICRO_BATCHES

A part sleeps, so that the processors of the machine do not matter. Each rank prints the share of a step in which it has
not worked, from its third step on, and the order of the forward (F) and backward (B) passes of its last step.
"""

import os
import sys
import time
from argparse import Namespace
from statistics import median
from typing import Any

import torch

sys.path.insert(0, os.path.dirname(sys.argv[1]))
import train

SECONDS = 0.02
PARTS = train.PARTS // 2  # of a rank
micro_batches = int(sys.argv[2])
part, step, took = train.part, train.Schedule1F1B.step, list[float]()
parts, order = list[int](), list[str]()  # of this rank: its parts, and the passes of its newest step


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: int) -> torch.Tensor:
        ctx.index = index
        order.extend("F" if index == parts[0] else "")
        time.sleep(SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        order.extend("B" if ctx.index == parts[0] else "")
        time.sleep(SECONDS)
        return gradient, None


class Slow(torch.nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.part, self.index = part(index), index
        parts.append(index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Pause.apply(self.part(x), self.index)


def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
    order.clear()
    began = time.monotonic()
    found = step(self, *args, **kwargs)
    took.append(time.monotonic() - began)
    return found


train.part = Slow
train.Schedule1F1B.step = timed
train.main(
    Namespace(steps=12, stages=2, schedule="1f1b", micro_batches=micro_batches, every_steps=None, checkpoint=None)
)
worked = micro_batches * PARTS * 2 * SECONDS
print(f"idle {1 - worked / median(took[2:]):.4f} stage {parts[0] // PARTS} order {''.join(order)}", flush=True)
