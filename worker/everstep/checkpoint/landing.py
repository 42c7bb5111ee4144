"""Where a commit's bytes land: in the live tensors where that comes to the same, else in new memory.

To touch new memory for the first time costs more than to read the bytes, and the state would be held twice. Knows trees
and tensors, nothing of files. Invariant: a live tensor is filled in place only if the commit fits all of the state, and
all of that tensor's key exactly; so what is refused because it does not fit is refused before it was changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from everstep.checkpoint.boxes import Box
from everstep.checkpoint.manifest import Entry
from everstep.checkpoint.state import Captured
from everstep.checkpoint.tree import TORCH, references


def fillable(captured: Captured, saved: Mapping[str, Any], entries: Mapping[str, Entry]) -> dict[str, torch.Tensor]:
    """The live tensors by name that a commit with these values (by state key) and entries may be read into."""
    found: dict[str, torch.Tensor] = {}
    for key, body in captured.values.items():
        other = saved.get(key)
        if not isinstance(body, dict) or not isinstance(other, dict) or body.get("kind") != other.get("kind"):
            return {}  # it will be refused
        names = set(references(body))
        if names == set(references(other)) and all(_equal(captured.tensors[n], entries.get(n)) for n in names):
            found |= {n: captured.tensors[n] for n in names}
    return found


def memory_of(local: torch.Tensor | None, box: Box) -> torch.Tensor | None:
    """The tensor, if the bytes of this box can be put straight into its memory."""
    if local is None or local.device.type != "cpu" or tuple(local.shape) != box.shape:
        return None
    return local if local.is_contiguous() and not local.is_conj() and not local.is_neg() else None


def _equal(tensor: torch.Tensor, entry: Entry | None) -> bool:
    return entry is not None and tuple(tensor.shape) == entry.shape and TORCH.get(entry.dtype) == tensor.dtype
