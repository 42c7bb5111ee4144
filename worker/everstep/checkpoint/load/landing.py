"""Chooses where a commit's bytes are read to: into the live tensors if the result is the same, else into new memory.

The first use of new memory costs more than reading the bytes, and the state would be held twice. Knows trees
and tensors, nothing of files. Invariant: a live tensor is filled in place only if the commit fits all of the state, and
all of that tensor's key exactly; so what is refused because it does not fit is refused before it was changed.
"""

from __future__ import annotations

import torch

from everstep.checkpoint.format.boxes import Box


def memory_of(local: torch.Tensor | None, box: Box) -> torch.Tensor | None:
    """The tensor, if the bytes of this box can be put straight into its memory."""
    if local is None or local.device.type != "cpu" or tuple(local.shape) != box.shape:
        return None
    return local if local.is_contiguous() and not local.is_conj() and not local.is_neg() else None
