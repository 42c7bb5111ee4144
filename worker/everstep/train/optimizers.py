"""Hooks on the steps of optimizers, also of those that scripts have made their own way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

TABLES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def before_step(optimizer: torch.optim.Optimizer, call: Callable[..., None]) -> Any:
    """`call(optimizer, args, kwargs)` before each step; `remove()` of what is returned ends that."""
    _make_tables(optimizer)
    return optimizer.register_step_pre_hook(call)


def after_step(optimizer: torch.optim.Optimizer, call: Callable[..., None]) -> Any:
    """The same after each step that did not raise."""
    _make_tables(optimizer)
    return optimizer.register_step_post_hook(call)


def _make_tables(optimizer: torch.optim.Optimizer) -> None:
    """A wrapper around another optimizer (Lookahead, torch's own PostLocalSGDOptimizer) may be an `Optimizer` without
    having called its `__init__`: then torch calls no hooks of its steps, and those of the inner one tell."""
    for name in TABLES:
        table = getattr(optimizer, name, None)
        if not isinstance(table, OrderedDict):
            setattr(optimizer, name, OrderedDict(table or {}))
