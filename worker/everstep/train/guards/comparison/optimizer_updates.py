"""Describes the first step of an optimizer after a commit: its settings, and the gradients that it is given.

After a restart a process may compute the same gradients as before, and its optimizer may still take another step: a
counter in the script sets the learning rate, or a history of norms clips the gradients. Both are visible when the
optimizer begins. Invariant: a process of the same kind with the same state, samples and random numbers finds the same
numbers here, except for the rounding of its kernels. So only the first optimizer's gradients are described: those of
the others depend on its step.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from everstep.train.guards.comparison.local_gradients import (
    CLOSE_ON_DEVICE,
    LocalGradients,
    are_apart,
    closeness,
    smallest,
    sums_of,
)

MOST_GROUPS = 1000  # groups of an optimizer whose settings are described
CLOSE_SETTING = 1e-6  # as a part of the setting: a rate may be computed from a loss


class OptimizerUpdates:
    """The updates of one step, by the tracked optimizers among `state`. `computed` names their parameters."""

    def __init__(self, state: Mapping[str, Any], computed: LocalGradients) -> None:
        self._keys = {id(o): key for key, o in state.items() if isinstance(o, torch.optim.Optimizer)}
        self._names = computed.name_of
        self._settings: dict[str, float] = {}
        self._gradients: dict[str, list[float]] = {}  # the norm of each, and its sum
        self._parameters: dict[str, torch.Tensor] = {}

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer before it steps. Only its first step counts."""
        key = self._keys.pop(id(optimizer), None)
        if key is None:
            return
        if not self._settings:
            every = (p for group in optimizer.param_groups for p in group["params"])
            self._parameters = {self._names[id(p)]: p for p in every if p.grad is not None and id(p) in self._names}
            for name, p in self._parameters.items():
                norm, *columns = sums_of(p.grad.detach()).tolist()  # type: ignore[union-attr]  # just looked at
                self._gradients[name] = [norm, sum(columns)]
        self._settings[f"len({key}.param_groups)"] = len(optimizer.param_groups)
        for i, group in enumerate(optimizer.param_groups[:MOST_GROUPS]):
            for setting, value in group.items():
                if setting != "params":
                    self._settings |= dict(_numbers(f"{key}.param_groups[{i}][{setting!r}]", value))

    def noted(self) -> dict[str, Any]:
        """The argument for `difference` in another process, as JSON values."""
        return {"settings": self._settings, "gradients": self._gradients}

    def difference(self, noted: Any, *, alike: bool) -> str | None:
        """A text that says how this process's optimizers differ from those that were `noted`. `alike`: on a machine of
        the same kind. Values of another form are ignored."""
        try:
            return self._setting(noted["settings"], alike) or self._gradient(noted["gradients"], alike)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    def _setting(self, noted: Mapping[str, float], alike: bool) -> str | None:
        for name, now in self._settings.items():
            then = noted.get(name, now)
            both_unknown = math.isnan(now) and math.isnan(then)
            if not (both_unknown or math.isclose(now, then, rel_tol=CLOSE_SETTING if alike else CLOSE_ON_DEVICE)):
                return f"{name} is {now:.6g}, and was {then:.6g}"
        return None

    def _gradient(self, noted: Mapping[str, list[float]], alike: bool) -> str | None:
        small = smallest([norm for norm, _ in noted.values()])
        for name, mine in self._gradients.items() if noted else ():
            theirs, close = noted.get(name, (0.0, 0.0)), closeness(self._parameters[name], alike=alike)
            if are_apart(np.array(mine), np.array(theirs), close, small):
                return f"the optimizer is given other gradients of {name}, though the same were computed"
        return None


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """A setting that is a number, or the elements of one such as betas."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        yield name, float(value.detach())
    elif isinstance(value, numbers.Real):
        yield name, float(value)
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _numbers(f"{name}[{i}]", part)
