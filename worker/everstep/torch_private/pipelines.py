"""Torch's pipelines."""

from __future__ import annotations

from typing import Any


def microbatches_of(schedule: Any) -> int:
    """Into how many parts the schedule divides a batch and its target; 1 for a class that is not torch's."""
    return int(getattr(schedule, "_n_microbatches", 1))
