"""Checks that staged parameters are finite, so that a run never goes back to a diverged state.

Runs on the writer's thread over host memory, so training does not wait for it. One pass at memory speed: a sum is NaN
or infinite if any element is. Only then each element is checked, because a sum of large finite ones may overflow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

Nonfinite = Literal["refuse", "mark", "allow"]


@dataclass(frozen=True, slots=True)
class Checked:
    """Bytes of a staged shard that hold elements of the tensor `name`."""

    name: str
    dtype: torch.dtype
    begin: int
    end: int


def nonfinite(data: bytearray | memoryview, spans: Iterable[Checked]) -> list[str]:
    """The names, sorted, of the tensors that hold NaN or infinity."""
    whole = torch.frombuffer(data, dtype=torch.uint8)
    names = set()
    for span in spans:
        if span.end > span.begin and span.dtype.is_floating_point and span.dtype.itemsize > 1:
            part = whole[span.begin : span.end].view(span.dtype)
            if not torch.isfinite(part.sum()) and not bool(torch.isfinite(part).all()):
                names.add(span.name)
    return sorted(names)
