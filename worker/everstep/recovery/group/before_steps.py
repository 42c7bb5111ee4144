"""Refuses to train before `steps`: until then a process is alone, and DDP averages its gradients with nobody's.

A forward or backward pass may come before (to compile, to measure memory), and an optimizer of a module that is not in
DDP: what a process computes by itself is the same on all of them.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from everstep.recovery.errors import LoopError
from everstep.recovery.group.script_location import script_call_site


def refuse_training(alone: Callable[[], bool]) -> None:
    """While `alone()`. Once in a process."""
    free: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # of no module in DDP

    def hook(optimizer: Optimizer, *_: Any) -> None:
        if not alone() or optimizer in free:
            return
        wrapped = {id(p) for ddp in gc.get_objects() if type(ddp) is DistributedDataParallel for p in ddp.parameters()}
        if not any(id(p) in wrapped for group in optimizer.param_groups for p in group["params"]):
            free.add(optimizer)
            return
        asked = script_call_site(sys._getframe(1))
        raise LoopError(
            f"optimizer.step(){asked.at if asked is not None else ''} of a model in DistributedDataParallel, before "
            "run.steps(): this process is alone until then, and its gradients are averaged with nobody's. Let the loop "
            "be `for step in run.steps(loader, until=STEPS):` and do its work inside `with step as batch:` "
            "(docs/how-to-convert.md)"
        )

    register_optimizer_step_pre_hook(hook)
