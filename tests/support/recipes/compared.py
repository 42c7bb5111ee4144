"""Where two states differ, bit by bit. It imports nothing but torch, so that it runs in an image too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def compare(where: str, left: Any, right: Any, found: list[str]) -> None:
    """Add to `found` the places at which two values differ. `where`: the place of these two."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        found.extend(f"{where}/{key}: in one only" for key in left.keys() ^ right.keys())
        for key in left.keys() & right.keys():
            compare(f"{where}/{key}", left[key], right[key], found)
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        for i, (one, other) in enumerate(zip(left, right, strict=True)):
            compare(f"{where}/{i}", one, other, found)
    elif isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            found.append(f"{where}: {left.dtype} {tuple(left.shape)}, {right.dtype} {tuple(right.shape)}")
        elif not torch.equal(_bytes(left), _bytes(right)):
            found.append(f"{where}: differs by up to {(left.double() - right.double()).abs().max().item():.3g}")
    elif left != right:
        found.append(f"{where}: {left!r} and {right!r}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
