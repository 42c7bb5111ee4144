"""Refuses a step in which an optimizer moves by gradients that DistributedDataParallel has not averaged.

DDP decides at its creation which parameters it averages: those that require gradients then. Each rank trains a
parameter that is thawed later on its own, without an error. For a parameter that is frozen later DDP waits, and
averages none of that step's gradients; torch reports that a step later. Both are found here when an optimizer is about
to step, on all ranks alike.

Invariant: no state has changed when this raises. A step costs one look at each parameter that DDP knows.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from everstep.checkpoint.state.modules import bare
from everstep.recovery.ddp.reducers import Reducers, parallel, parameters_of
from everstep.recovery.errors import LoopError
from everstep.recovery.state.optimizers import before_step
from everstep.torch_private import reducers
from everstep.train.guards.replicas import cared_for


class Stepping(Protocol):
    """Says whether a step is being made."""

    in_step: bool


class GradientReduction:
    """Checks the DDP objects of a process and the optimizers of the tracked `state`, in the steps that
    `stepping` sees. `lasts`: the world does not change, so the script may make DDP objects in its loop too."""

    def __init__(self, state: Mapping[str, Any], reducers: Reducers, stepping: Stepping, *, lasts: bool) -> None:
        self._stepping = stepping
        self._lasts = lasts
        self._names = _names(state)
        self._ddps = [(weakref.ref(ddp), reducers.reduced(ddp)) for ddp in reducers.alive()]
        self._averaged = {id(p) for _, reduced in self._ddps for p in reduced}
        self._sizes: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._others: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[torch.Tensor]] = weakref.WeakKeyDictionary()
        if self._ddps:
            for optimizer in state.values():
                if isinstance(optimizer, torch.optim.Optimizer):
                    before_step(optimizer, self._check)

    def _check(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._stepping.in_step:
            return
        for p in self._left_out(optimizer):
            if p.requires_grad and p.grad is not None and not (self._lasts and self._is_averaged_by_now(p)):
                raise LoopError(
                    f"{self._name(p)}: requires_grad was switched on after DistributedDataParallel was made. It "
                    "averages only the gradients of parameters that required them then, so each rank would train this "
                    "parameter on its own. Make DistributedDataParallel while the parameter requires gradients, and "
                    "freeze it afterwards: `model = "
                    "DistributedDataParallel(net, find_unused_parameters=True)`, then `….requires_grad_(False)`"
                )
        for reference, reduced in self._ddps:
            flags = [p.requires_grad for p in reduced]
            if all(flags) or not any(flags):  # DDP does not wait for a module that is frozen as a whole
                continue
            ddp: Any = reference()
            if ddp is None or ddp.find_unused_parameters or not _is_waiting(ddp):
                continue
            raise LoopError(
                f"{self._name(reduced[flags.index(False)])}: requires_grad was switched off after "
                "DistributedDataParallel was made. It waits for this parameter's gradient, and so averages no gradient "
                "of this step. Freeze the parameter before DistributedDataParallel is made, or write "
                "`DistributedDataParallel(net, find_unused_parameters=True)`"
            )

    def _left_out(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The parameters of modules in DDP that the optimizer moves and DDP does not average."""
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._sizes.get(optimizer) != size:
            inside = {id(p) for reference, _ in self._ddps if (ddp := reference()) for p in cared_for(ddp)}
            listed = [p for group in optimizer.param_groups for p in group["params"]]
            self._others[optimizer] = [p for p in listed if id(p) in inside and id(p) not in self._averaged]
            self._sizes[optimizer] = size
        return self._others[optimizer]

    def _is_averaged_by_now(self, parameter: torch.Tensor) -> bool:
        """Whether a DDP object that was made in the loop averages the parameter."""
        known = [reference() for reference, _ in self._ddps]
        later = [ddp for ddp in parallel() if not any(ddp is older for older in known)]
        self._averaged |= {id(p) for ddp in later for p in parameters_of(ddp)}
        self._sizes.clear()
        return id(parameter) in self._averaged

    def _name(self, parameter: torch.Tensor) -> str:
        if id(parameter) in self._names:
            return self._names[id(parameter)]
        modules = (ddp.module for reference, _ in self._ddps if (ddp := reference()) is not None)
        return next((n for m in modules for n, p in m.named_parameters() if p is parameter), "a parameter")


def _names(state: Mapping[str, Any]) -> dict[int, str]:
    """The names of the tracked modules' parameters, by identity."""
    modules = ((key, bare(value)) for key, value in state.items() if isinstance(value, torch.nn.Module))
    return {id(p): f"{key}.{name}" for key, module in modules for name, p in module.named_parameters()}


def _is_waiting(ddp: Any) -> bool:
    """Whether its last backward pass has averaged some gradients, and waits for others. This rebuilds DDP's buckets
    now, which its next forward pass would have done."""
    try:
        reducers.rebuild_buckets(ddp)
    except RuntimeError as e:
        if "finished reduction" in str(e):
            return True
        raise
    return False
