"""The gradient scalers of a run, also those that a class of the script's own holds.

timm and its like track an object whose `state_dict` is its scaler's. What torch's scaler notes within a step (that an
optimizer's gradients were unscaled, say) is in no `state_dict`, so it has to be found to be put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def scalers(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.amp.GradScaler]]:
    """Those that are enabled among the tracked objects and their attributes, each once, by name."""
    found: set[int] = set()
    for name, scaler in _all(state):
        if scaler.is_enabled() and id(scaler) not in found:
            found.add(id(scaler))
            yield name, scaler


def _all(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.amp.GradScaler]]:
    for name, target in state.items():
        if isinstance(target, torch.amp.GradScaler):
            yield name, target
        elif not isinstance(target, torch.nn.Module | torch.optim.Optimizer):
            for key, value in _attributes(target).items():
                if isinstance(value, torch.amp.GradScaler):
                    yield f"{name}.{key}", value


def _attributes(target: Any) -> Mapping[str, Any]:
    try:
        return dict(vars(target))
    except TypeError:  # a dictionary, a list, or a class with slots
        return target if isinstance(target, dict) and all(isinstance(k, str) for k in target) else {}
