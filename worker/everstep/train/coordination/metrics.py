"""Collects metrics of a step without waiting for a device: a value on a GPU is copied in the background and read later.

Invariant: this module keeps no autograd graph alive. Only `of_step` waits for a device; a save calls it, and a save
waits for the device anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from everstep.contract.messages import MAX_METRICS

MOST_OF_STEP: Final = 64  # a commit's record has room for so many


class Metrics:
    """`log` may be called at any time. `ready`: by name, the newest values that have arrived. `of_step`: the values
    that belong to the state after the newest step, logged in that step or of that state since."""

    def __init__(self) -> None:
        self._ready: dict[str, Any] = {}
        self._coming: dict[str, tuple[torch.Tensor, Any]] = {}  # name → pinned host copy and the event that ends it
        self._of_step: dict[str, Any] = {}
        self._of_state: dict[str, Any] = {}

    def log(self, values: Mapping[str, Any], *, of_state: bool = False) -> None:
        """Log values. `of_state`: they were measured between two steps, and do not belong to the next one."""
        into = self._of_state if of_state else self._of_step
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                value = value.detach().clone()  # noqa: PLW2901  the script may change its own tensor
            if len(into) < MOST_OF_STEP or name in into:
                into[name] = value
            if name not in self._ready and len(self._ready) + len(self._coming) >= MAX_METRICS:
                continue
            if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
                self._ready[name] = value
            elif name not in self._coming:
                host = torch.empty((), dtype=torch.float32, pin_memory=True)
                host.copy_(value.float().reshape(()), non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                self._coming[name] = (host, event)

    def ready(self) -> dict[str, Any]:
        for name, (host, event) in list(self._coming.items()):
            if event.query():
                self._ready[name] = host
                del self._coming[name]
        return dict(self._ready)

    def of_step(self) -> dict[str, float]:
        """The numbers, by name, without tensors of several elements."""
        return _numbers(self._of_step | self._of_state)

    def of_state(self) -> dict[str, float]:
        """The numbers that were measured since the step."""
        return _numbers(self._of_state)

    def counted(self) -> None:
        """A step is complete, so the state has changed."""
        self._of_state.clear()

    def over(self) -> None:
        """The step has logged everything: later values belong to another step."""
        self._of_step.clear()


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value.item() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
        if not isinstance(value, torch.Tensor) or (value.numel() == 1 and not value.is_complex())
    }
