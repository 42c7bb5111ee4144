"""The state that every subject saves and loads: a transformer's parameters in float32 with Adam's two moments.

The shapes are a decoder's (wide matrices, and biases and norms of a few KiB), because an engine that is quick only for
one large tensor is not quick. All ranks hold the same, as under DDP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    """One decoder block's parameters; it is never run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Trained:
    """A model and its optimizer after one step, about `size` bytes together."""

    def __init__(self, size: int) -> None:
        torch.manual_seed(1)
        width = 512 if size < 2**29 else 1024
        one = sum(p.numel() for p in Block(width).parameters()) * 4 * 3
        self.model = nn.Sequential(*(Block(width) for _ in range(max(1, round(size / one)))))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-9)
        for p in self.model.parameters():
            p.grad = torch.rand_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> list[torch.Tensor]:
        moments = [t for s in self.optimizer.state.values() for t in s.values()]
        return [p.detach() for p in self.model.parameters()] + moments

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def state(self) -> dict[str, Any]:
        """What a script passes to `Checkpointer.save` and `restore`."""
        return {"model": self.model, "optimizer": self.optimizer, "step": 1}

    def state_dicts(self) -> dict[str, Any]:
        """What a script passes to `torch.save` and DCP."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def digest(self) -> float:
        """A number that differs if a tensor was not restored."""
        return float(sum(t.double().sum() * (i + 1) for i, t in enumerate(self.tensors())))

    def spoil(self) -> None:
        """Overwrite every tensor, so that what is right afterwards was read."""
        with torch.no_grad():
            for t in self.tensors():
                t.fill_(7)
