"""Keeps gradients inside one step: no checkpoint holds them, and no new process has those of the step before.

It refuses a step that leaves gradients for the next one, in every world: a restart loses them, and so does a lost peer.
It also keeps which parameters have a gradient at all between two steps, because optimizers treat zeros and None
differently. Invariant: after `put_back` a tracked parameter has a gradient, of zeros, if and only if it had one when
the step began.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import torch

from everstep.recovery.errors import LoopError
from everstep.recovery.state.optimizers import before_step
from everstep.recovery.state.scalers import scalers
from everstep.torch_private.optimizers import scale_of, steps_of
from everstep.torch_private.tensors import marks, version, versions

_NOTHING = frozenset({type(None)})
SAMPLE = 16  # parameters that are checked to see whether a backward pass has run


class Update(IntEnum):
    """What a rank's optimizers do in a step."""

    NONE = 0  # there are no optimizers
    MADE = 1
    LEFT_OUT = 2


class Gradients:
    """Refuses leftover gradients of the parameters of all tracked optimizers, or of all tracked modules if no optimizer
    is tracked. Puts back those of both."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.optimizers = [t for t in state.values() if isinstance(t, torch.optim.Optimizer)]
        self._modules = [t for t in state.values() if isinstance(t, torch.nn.Module)]
        self._scalers = [scaler for _, scaler in scalers(state)]
        self._hooks = [before_step(o, self._enter) for o in self.optimizers]
        self.updates = 0  # optimizer steps that were begun in this world
        self._fewest: int | None = None  # the fewest in one step of this world
        self._left_out = False  # whether the newest step made fewer than any before it, or none
        self._watching: list[Any] = []
        # For each parameter that had a gradient: whether the gradient existed whenever a backward pass came to it.
        self._existed: list[list[torch.Tensor]] = []
        self.look()
        self.begin()

    def look(self) -> None:
        """Find the parameters again."""
        of_modules = [p for m in self._modules for p in m.parameters()]
        of_optimizers = [p for o in self.optimizers for group in o.param_groups for p in group["params"]] or of_modules
        self._parameters = list({id(p): p for p in of_optimizers}.values())
        # Parameters of modules count too. One that the loop changes itself, or that gets an optimizer later, must not
        # begin a repeated step with the gradient of the failed one.
        self._all = list({id(p): p for p in (*of_modules, *of_optimizers)}.values())
        self._sample = [p for p in self._parameters if p.requires_grad]
        self._sample = self._sample[:: max(1, len(self._sample) // SAMPLE)]

    def begin(self, *, watched: bool = False) -> None:
        """Begin a step. `watched`: find out whether its backward pass begins on gradients of the step before."""
        if watched:
            self.look()
        self.entered = False
        if not self.updates:
            self._fewest = None  # in a new world all members must judge alike
        self._made = self.updates
        self._there = self.present
        self._before = self._marks()
        self._scales = self._updates()
        self._unwatch()
        if watched:
            self._watch()

    def ended(self, step: int) -> None:
        """Check a step whose block ended well. Raises `LoopError`."""
        self._unwatch()
        made = self.updates - self._made
        self._left_out = bool(self.optimizers) and (not made or (self._fewest is not None and made < self._fewest))
        self._fewest = made if self._fewest is None else min(made, self._fewest)
        # Another pass may come first (for an adversarial example), whose gradients are cleared again.
        if any(existed and all(bool(there) for there in existed) for existed in self._existed):
            raise LoopError(
                f"the backward pass of step {step} began on gradients of the step before, which no checkpoint holds "
                "and a new process does not have. Call optimizer.zero_grad() in each step; to add up the gradients of "
                "several batches use run.loader(…, micro_batch=…), and `with step as batches: for batch in batches: …`"
            )
        if not self.optimizers:
            return  # the loop changes parameters itself, perhaps through `.data`
        if self.entered or self._scales != self._updates() or any(map(_skipped, self._scalers)):
            return
        now = self._marks()
        if all(grad == was for (grad, _), (was, _) in zip(now, self._before, strict=True)):
            return  # no backward pass
        if any(moved != was for (_, moved), (_, was) in zip(now, self._before, strict=True)):
            return  # the loop changes parameters itself
        if not any(p.grad is not None and bool(p.grad.detach().any()) for p in self._parameters):
            return
        raise LoopError(
            f"step {step} ended with gradients and without an optimizer's step: no checkpoint holds them, and they are "
            "lost with a peer. To add up gradients over several batches make them micro-batches of one step: "
            "run.loader(…, micro_batch=…), `with step as batches: for batch in batches: …backward()`, then "
            "optimizer.step(). To leave a step out call optimizer.zero_grad() before it ends"
        )

    @property
    def update(self) -> Update:
        """What the optimizers have done so far in the present step."""
        if self.entered:
            return Update.MADE
        return Update.LEFT_OUT if self.optimizers else Update.NONE

    def uncount(self) -> None:
        """Take back the newest step, which was not one of the run."""
        self.updates = self._made

    def take_left_out(self) -> bool:
        """Whether the newest step, which ended well, made no optimizer step, or fewer than any earlier one of this
        world. True only at the first call."""
        left_out, self._left_out = self._left_out, False
        return left_out

    def put_back(self) -> None:
        """Put back the gradients after a failed step."""
        self._unwatch()
        for p in self._all:
            p.grad = None
        self.add(self._there)

    def add(self, there: list[bool]) -> None:
        """Give those of these parameters that have no gradient one of zeros."""
        for p, has, sparse in zip(self._all, there[::2], there[1::2], strict=True):
            if has and p.grad is None:
                p.grad = zero_gradient(p, sparse=sparse)

    @property
    def present(self) -> list[bool]:
        """For each parameter whether it has a gradient, and whether that is sparse."""
        gradients = [p.grad for p in self._all]
        if _NOTHING.issuperset(map(type, gradients)):  # the optimizer has cleared them, as in most steps
            return [False] * (2 * len(gradients))
        return [flag for g in gradients for flag in (g is not None, g is not None and g.is_sparse)]

    def end(self) -> None:
        """End the run."""
        self._unwatch()
        for hook in self._hooks:
            hook.remove()

    def _enter(self, *_: Any) -> None:
        self.entered = True
        self.updates += 1

    def _marks(self) -> list[tuple[Any, int]]:
        return list(zip(marks(p.grad for p in self._sample), versions(self._sample), strict=True))

    def _updates(self) -> list[int]:
        return [0 if (scale := scale_of(scaler)) is None else version(scale) for scaler in self._scalers]

    def _watch(self) -> None:
        self._existed = []
        for p in self._parameters:
            if p.requires_grad and p.grad is not None:
                self._existed.append([])
                self._watching.append(p.register_hook(_look(p, self._existed[-1])))

    def _unwatch(self) -> None:
        for hook in self._watching:
            hook.remove()
        self._watching = []


def _look(parameter: torch.Tensor, existed: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        grad = parameter.grad
        existed.append(torch.zeros((), dtype=torch.bool) if grad is None else grad.detach().any())  # without a wait

    return hook


def zero_gradient(parameter: torch.Tensor, *, sparse: bool) -> torch.Tensor:
    """A gradient of zeros. `sparse`: in the form of an embedding with `sparse=True`, whose optimizer refuses others."""
    if not sparse:
        return torch.zeros_like(parameter)
    values = parameter.detach().new_zeros((0, *parameter.shape[1:]))
    rows = torch.zeros((1, 0), dtype=torch.int64, device=values.device)
    return torch.sparse_coo_tensor(rows, values, parameter.shape)


def _skipped(scaler: Any) -> bool:
    """Whether the scaler was asked for an optimizer's step and did not make it."""
    states = list(steps_of(scaler).values())
    return any(getattr(state.get("stage"), "name", "") == "STEPPED" for state in states)
