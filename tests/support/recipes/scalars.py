"""Reads what a recipe has logged for TensorBoard."""

from __future__ import annotations

import importlib
from pathlib import Path


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values of a curve, as TensorBoard shows them."""
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    seen = accumulator.EventAccumulator(str(folder))
    seen.Reload()
    return [(event.step, event.value) for event in seen.Scalars(name)]
