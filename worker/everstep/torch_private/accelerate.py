"""Accelerate: what an accelerator has prepared, and the state that its classes share."""

from __future__ import annotations

from typing import Any


def models_of(accelerator: Any) -> list[Any]:
    """The models that it has prepared."""
    models: list[Any] = accelerator._models
    return models


def optimizers_of(accelerator: Any) -> list[Any]:
    """The optimizers that it has prepared."""
    optimizers: list[Any] = accelerator._optimizers
    return optimizers


def schedules_of(accelerator: Any) -> list[Any]:
    """The schedules that it has prepared."""
    schedulers: list[Any] = accelerator._schedulers
    return schedulers


def loaders_of(accelerator: Any) -> list[Any]:
    """The loaders that it has prepared. The list may be changed."""
    loaders: list[Any] = accelerator._dataloaders
    return loaders


def registered_of(accelerator: Any) -> list[Any]:
    """The objects that `register_for_checkpointing` was called with."""
    objects: list[Any] = accelerator._custom_objects
    return objects


def set_sync(accelerator: Any, *, on: bool) -> None:
    """Set `accelerator.sync_gradients`, by which prepared optimizers and schedules step or do nothing."""
    accelerator.gradient_state._set_sync_gradients(on)


def shared_state(kind: Any) -> dict[str, Any]:
    """The attributes that all objects of `PartialState`, `AcceleratorState` or `GradientState` share; empty before the
    first one is made. They may be changed."""
    shared: dict[str, Any] = kind._shared_state
    return shared
