"""Refuses to train before `steps`: until then a process is alone, so DDP would not average its gradients.

A forward or backward pass is allowed before (to compile, to measure memory). A step of an optimizer is allowed too if
its module is not in DDP, because each process computes the same by itself.
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
    """Refuse to train while `alone()` holds. Called once in a process."""
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
            "run.steps(): this process is alone until then, and its gradients are not averaged. Let the loop "
            "be `for step in run.steps(loader, until=STEPS):` and do its work inside `with step as batch:` "
            "(docs/how-to-convert.md)"
        )

    register_optimizer_step_pre_hook(hook)
