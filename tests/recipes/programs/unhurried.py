"""Runs a script, and lets a resize happen while it trains: `unhurried.py STEP:SIZE[,STEP:SIZE…] SCRIPT …`.

From STEP on, each step is long until the world has SIZE processes. A small model would be trained before the operator
has changed anything.
"""

import os
import runpy
import sys
import time
from typing import Any

import torch.distributed as dist

from everstep.train.step import Step

LONG = 0.5  # seconds
sizes = [(int(step), int(size)) for step, _, size in (pair.partition(":") for pair in sys.argv[1].split(","))]
enter = Step.__enter__


def waiting(step: Step) -> Any:
    wanted = [size for first, size in sizes if step.number >= first]
    if wanted and dist.is_initialized() and dist.get_world_size() != wanted[-1]:
        time.sleep(LONG)
    return enter(step)


Step.__enter__ = waiting  # type: ignore[method-assign]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
