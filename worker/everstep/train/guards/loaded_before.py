"""Finds what the script has loaded from a file of its own before the first step of a run: an optimizer or a schedule
that has taken steps already. The run knows nothing of these, and counts its own from 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

TEXT = (
    "loaded before the first step: %s. They have taken steps, as if the script had loaded a file of its own; this run "
    "begins with step 0 and epoch 0 all the same, because it goes on from commits alone. If that file is of an earlier "
    "training, let the run have the epochs that are left, `run.epochs(loader, epochs - first)`, and do not write to "
    "that file in it. If the run itself writes the file, leave out what loads it"
)


def moved_before(state: Mapping[str, Any]) -> list[str]:
    """The names of tracked optimizers and schedules that have taken steps."""
    return [name for name, value in state.items() if _has_moved(value)]


def _has_moved(value: object) -> bool:
    if isinstance(value, LRScheduler):
        if isinstance(last := getattr(value, "last_epoch", None), int):
            return last > 0
        # A `ChainedScheduler` counts nothing itself.
        lists = [part for part in vars(value).values() if isinstance(part, list | tuple)]
        return any(_has_moved(part) for parts in lists for part in parts if isinstance(part, LRScheduler))
    if not isinstance(value, torch.optim.Optimizer):
        return False
    # Some make a state without a step when they are made, as Adagrad does.
    states = [state for state in value.state.values() if isinstance(state, Mapping) and state]
    return any(_is_above_0(state["step"]) if "step" in state else True for state in states[:1])


def _is_above_0(step: Any) -> bool:
    """An optimizer of the script's may keep anything under this name."""
    try:
        return float(step) > 0
    except (TypeError, ValueError, RuntimeError):
        return False
