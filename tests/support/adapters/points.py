"""Samples of which each adapter's rounds make the same regression."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([index / self.samples, (index % 10) / 10, 1.0])
        return x, (x.sum() ** 2).reshape(1)
