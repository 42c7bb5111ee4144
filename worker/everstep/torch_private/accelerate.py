"""Accelerate: what an accelerator has prepared, and the state that its classes share."""

from __future__ import annotations

from typing import Any


def models_of(accelerator: Any) -> list[Any]:
    """The models that it has prepared."""
    found: list[Any] = accelerator._models
    return found


def optimizers_of(accelerator: Any) -> list[Any]:
    """The optimizers that it has prepared."""
    found: list[Any] = accelerator._optimizers
    return found


def schedules_of(accelerator: Any) -> list[Any]:
    """The schedules that it has prepared."""
    found: list[Any] = accelerator._schedulers
    return found


def loaders_of(accelerator: Any) -> list[Any]:
    """The loaders that it has prepared. The list may be changed."""
    found: list[Any] = accelerator._dataloaders
    return found


def registered_of(accelerator: Any) -> list[Any]:
    """The objects that `register_for_checkpointing` was called with."""
    found: list[Any] = accelerator._custom_objects
    return found


def set_sync(accelerator: Any, *, on: bool) -> None:
    """Set `accelerator.sync_gradients`, by which prepared optimizers and schedules step or do nothing."""
    accelerator.gradient_state._set_sync_gradients(on)


def shared_state(kind: Any) -> dict[str, Any]:
    """The attributes that all objects of `PartialState`, `AcceleratorState` or `GradientState` share; empty before the
    first one is made. They may be changed."""
    found: dict[str, Any] = kind._shared_state
    return found
