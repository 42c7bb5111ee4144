"""Half of a set of points, and the module that Lightning trains on it: for programs and tests that bring a net of their
own, whose forward pass takes `x` and `labels` and gives a loss."""

# ruff: noqa: PLC0415  Lightning is imported where it is used: it takes ten seconds

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import Dataset


class Split(Dataset[Any]):
    """32 of 64 points, drawn with `seed`."""

    def __init__(self, seed: int) -> None:
        self.indices = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:32].tolist()

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.full((3,), self.indices[index] / 64)
        return {"x": x, "labels": x.sum().reshape(1)}


def module_of(net: torch.nn.Module, optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]) -> Any:
    """A LightningModule whose `net` is this one."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):  # type: ignore[misc]  # its types are not followed
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return optimizer(self.net.parameters())

    return Module()
