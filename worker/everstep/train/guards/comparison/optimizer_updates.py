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
from collections.abc import Mapping
from typing import Any

import torch

from everstep.train.guards.comparison.local_gradients import CLOSE_ON_DEVICE, SMALL, LocalGradients, closeness, flat

MOST_GROUPS = 1000  # groups of an optimizer whose settings are described
CLOSE_SETTING = 1e-6  # as a part of the setting: a rate may be computed from a loss


class OptimizerUpdates:
    """The updates of one step, by the tracked optimizers among `state`. `computed` names their parameters."""

    def __init__(self, state: Mapping[str, Any], computed: LocalGradients) -> None:
        self._keys = {id(o): key for key, o in state.items() if isinstance(o, torch.optim.Optimizer)}
        self._names = computed.name_of
        self._settings: dict[str, list[dict[str, Any]]] = {}
        self._gradients: dict[str, tuple[float, float]] | None = None
        self._parameters: dict[str, torch.Tensor] = {}

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer before it steps. Only its first step counts."""
        key = self._keys.get(id(optimizer))
        if key is None or key in self._settings:
            return
        groups = optimizer.param_groups
        self._settings[key] = [_settings(group) for group in groups[:MOST_GROUPS]]
        if self._gradients is None:
            every = (p for group in groups for p in group["params"])
            self._parameters = {self._names[id(p)]: p for p in every if p.grad is not None and id(p) in self._names}
            self._gradients = {name: _sums(p.grad) for name, p in self._parameters.items()}

    def told(self) -> dict[str, Any]:
        """The argument for `difference` in another process, as JSON values."""
        return {"settings": self._settings, "gradients": self._gradients}

    def difference(self, told: Any, *, alike: bool) -> str | None:
        """A text that says how this process's optimizers differ from what was `told`. `alike`: a machine of the same
        kind told it. Values of another form are ignored."""
        try:
            return self._setting(told["settings"], alike) or self._gradient(told["gradients"] or {}, alike)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    def _setting(self, told: Mapping[str, list[dict[str, Any]]], alike: bool) -> str | None:
        for key, mine in self._settings.items():
            theirs = told.get(key, mine)
            if len(theirs) != len(mine):
                return f"{key} has {len(mine)} groups of parameters, and had {len(theirs)}"
            for i, (now, then) in enumerate(zip(mine, theirs, strict=True)):
                for name in now.keys() & then.keys():
                    if not _same(now[name], then[name], CLOSE_SETTING if alike else CLOSE_ON_DEVICE):
                        where = f"{key}.param_groups[{i}]['{name}']"
                        return f"{where} is {_shown(now[name])}, and was {_shown(then[name])}"
        return None

    def _gradient(self, told: Mapping[str, list[float]], alike: bool) -> str | None:
        if not self._gradients or not told:
            return None
        of_all = math.sqrt(sum(norm**2 for norm, _ in told.values() if math.isfinite(norm)))
        for name, mine in self._gradients.items():
            norm, total = told.get(name, (0.0, 0.0))
            close = closeness(self._parameters[name], alike=alike)
            size = max(mine[0], norm, SMALL * of_all)
            for now, then in ((mine[0], norm), (mine[1], total)):
                if not (abs(now - then) <= close * size or (not math.isfinite(now) and not math.isfinite(then))):
                    return f"the optimizer is given other gradients of {name}, though the same were computed"
        return None


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings that are numbers, or pairs of numbers such as betas."""
    found = {name: _number(value) for name, value in group.items() if name != "params"}
    return {name: value for name, value in found.items() if value is not None}


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, list | tuple) and value and all(isinstance(v, numbers.Real) for v in value):
        return [float(v) for v in value]
    return float(value) if isinstance(value, numbers.Real) else None


def _same(now: Any, then: Any, close: float) -> bool:
    if isinstance(now, list) and isinstance(then, list):
        return len(now) == len(then) and all(_same(a, b, close) for a, b in zip(now, then, strict=True))
    return now == then or (math.isnan(now) and math.isnan(then)) or math.isclose(now, then, rel_tol=close)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _sums(gradient: Any) -> tuple[float, float]:
    """The gradient's norm and its sum."""
    values = flat(gradient.detach())
    norm, total = torch.linalg.vector_norm(values, dtype=torch.float64), values.sum(dtype=torch.float64)
    found = torch.stack((norm, total)).tolist()
    return found[0], found[1]
