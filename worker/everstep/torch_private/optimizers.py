"""Optimizers' tables of hooks, ZeroRedundancyOptimizer's parts, gradient scalers and schedules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

_TABLES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def make_hook_tables(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer its tables of hooks. A wrapper around another optimizer (Lookahead, torch's own
    PostLocalSGDOptimizer) may be an `Optimizer` that did not call its `__init__`. Then torch calls no hooks for its
    steps, but those of the inner one."""
    for name in _TABLES:
        table = getattr(optimizer, name, None)
        if not isinstance(table, OrderedDict):
            setattr(optimizer, name, OrderedDict(table or {}))


def hooks_of(optimizer: torch.optim.Optimizer) -> list[Mapping[int, Any]]:
    """The tables of the hooks before and behind an optimizer's step, by their numbers."""
    return [getattr(optimizer, name, None) or {} for name in _TABLES]


def overlaps(divided: Any) -> bool:
    """Whether a ZeroRedundancyOptimizer steps in the backward pass."""
    return bool(divided._overlap_with_ddp)


def sync_groups(divided: Any, source: list[dict[str, Any]], to: list[dict[str, Any]]) -> None:
    """Copy the hyperparameters of a ZeroRedundancyOptimizer's groups to those of the optimizer inside it, or back."""
    divided._sync_param_groups(source, to)


def divide(divided: Any, part: int, parts: int) -> None:
    """Give a ZeroRedundancyOptimizer the parameters of part `part` of `parts`, as its constructor would. Its state is
    empty then."""
    divided.world_size, divided.rank, divided.global_rank = parts, part, part
    divided._clear_cache()
    divided._all_state_dicts = []  # what the script has consolidated is of another partition
    inner = divided.optim
    for group, mine in zip(inner.param_groups, divided._partition_parameters()[part], strict=True):
        group["params"][:] = mine["params"]  # in place: schedules and hooks refer to the groups
    inner.state.clear()
    divided._build_param_buckets()


def scale_of(scaler: Any) -> torch.Tensor | None:
    """A gradient scaler's scale on its device; None before its first use."""
    scale: torch.Tensor | None = getattr(scaler, "_scale", None)
    return scale


def growth_in(state: Mapping[str, Any]) -> int:
    """How many steps of a scaler's `state_dict` had finite gradients since the scale last changed."""
    return int(state["_growth_tracker"])


def is_of_one_step(name: str) -> bool:
    """Whether a gradient scaler's attribute is about the present step only."""
    return name == "_per_optimizer_states"


def steps_of(scaler: Any) -> dict[int, dict[str, Any]]:
    """What a gradient scaler knows about each optimizer in the present step."""
    states: dict[int, dict[str, Any]] = getattr(scaler, "_per_optimizer_states", {})
    return states


def is_schedule_state(value: object) -> bool:
    """Whether it is what a schedule's `state_dict` gives."""
    return isinstance(value, Mapping) and {"last_epoch", "_step_count"} <= set(value)
