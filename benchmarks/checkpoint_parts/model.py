"""The state that every subject saves and loads: a transformer's parameters in float32 with Adam's two moments.

The shapes are a decoder's (wide matrices, and biases and norms of a few KiB), because an engine that is quick only for
one large tensor is not quick. All ranks hold the same, as under DDP.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from everstep.checkpoint.state.alike import to_bytes


class Block(nn.Module):
    """One decoder block's parameters; it is never run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Shared:
    """Files in `folder` that hold the values of tensors, each mapped as often as it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def mapping(self, values: torch.Tensor) -> torch.Tensor:
        """Another mapping of the file of `values`: writes are seen through all of them."""
        file = self._folder / str(values.data_ptr())
        if not file.exists():
            values.numpy().tofile(file)
        return torch.from_file(str(file), shared=True, size=values.numel(), dtype=values.dtype).view(values.shape)


class Trained:
    """A model and its optimizer after one step, about `size` bytes together.

    Where it is `mapped`, all blocks map the memory of one block. Each tensor has a storage and addresses of its own,
    so that each subject reads, copies and writes all bytes, but the state itself takes the memory of one block.
    """

    def __init__(self, size: int, mapped: bool = False) -> None:
        torch.manual_seed(1)
        width = 512 if size < 2**29 else 1024
        one = sum(p.numel() for p in Block(width).parameters()) * 4 * 3
        blocks = max(1, round(size / one))
        self.model = nn.Sequential(*(Block(width) for _ in range(1 if mapped else blocks)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-9)
        for p in self.model.parameters():
            p.grad = torch.rand_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if mapped:
            self._repeat(blocks, width)

    def _repeat(self, blocks: int, width: int) -> None:
        """`blocks` blocks that map the memory of the first."""
        first, moments = list(self.model.parameters()), self.optimizer.state
        with torch.device("meta"):
            self.model = nn.Sequential(*(Block(width) for _ in range(blocks)))
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            memory = Shared(Path(folder))
            for block in self.model:
                for (name, _), values in zip(list(block.named_parameters()), first, strict=True):
                    module, _, attribute = name.rpartition(".")
                    setattr(block.get_submodule(module), attribute, nn.Parameter(memory.mapping(values.detach())))
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-9)
            for block in self.model:
                for p, values in zip(block.parameters(), first, strict=True):
                    self.optimizer.state[p] = {k: memory.mapping(v) for k, v in moments[values].items()}

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

    def digest(self) -> int:
        """A number that differs if a tensor was not restored to the bit, in its place."""
        found = xxhash.xxh3_64()
        for t in self.tensors():
            found.update(to_bytes(t))
        return found.intdigest()

    def spoil(self) -> None:
        """Overwrite every tensor, so that what is right afterwards was read."""
        with torch.no_grad():
            for t in self.tensors():
                t.fill_(7)
