"""Metrics of a step without waiting for a device: a value on a GPU is copied in the background, and read later.

Invariant: nothing here synchronises a device or keeps an autograd graph alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from everstep.contract.messages import MAX_METRICS


class Metrics:
    """`log` at any moment; `ready` is what can be read now, by name, of the newest values that have arrived."""

    def __init__(self) -> None:
        self._ready: dict[str, Any] = {}
        self._coming: dict[str, tuple[torch.Tensor, Any]] = {}  # name → pinned host copy and the event that ends it

    def log(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name not in self._ready and len(self._ready) + len(self._coming) >= MAX_METRICS:
                continue
            if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
                self._ready[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
            elif name not in self._coming:
                host = torch.empty((), dtype=torch.float32, pin_memory=True)
                host.copy_(value.detach().float().reshape(()), non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                self._coming[name] = (host, event)

    def ready(self) -> dict[str, Any]:
        for name, (host, event) in list(self._coming.items()):
            if event.query():
                self._ready[name] = host
                del self._coming[name]
        return dict(self._ready)
