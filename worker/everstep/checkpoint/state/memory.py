"""Finds the memory ranges of tensors, and whether tensors share memory.

It knows tensors and their addresses, nothing of trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from everstep.checkpoint.state.sharding import local_of
from everstep.torch_private.tensors import below_subclasses


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a strided tensor with memory, and of the one behind its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size() if tensor.numel() else begin


def shows_twice(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether several elements of a tensor or array are one in memory. `strides` of any unit."""
    if 0 in shape:
        return False
    steps = sorted((abs(stride), size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    reach = 0  # of the axes before: where an axis steps beyond it, no two elements can meet
    for stride, size in steps:
        if not stride:
            return True
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    places = torch.zeros(1, dtype=torch.int64)
    for stride, size in steps:
        places = (places[:, None] + torch.arange(size) * stride).view(-1)
    places = places.sort().values
    return bool((places[1:] == places[:-1]).any())


def crossed(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of the tensors that share some memory with another one."""
    spans = sorted((*span(local_of(tensor)), name) for name, tensor in tensors.items())
    found: set[str] = set()
    reach, widest = 0, ""  # the furthest end so far, and whose it is
    for begin, end, name in spans:
        if begin < min(reach, end):
            found |= {widest, name}
        if end > reach:
            reach, widest = end, name
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same."""
    with torch.no_grad(), below_subclasses():
        return torch.equal(row_of(one), row_of(other))


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor in the order of its elements, on the CPU."""
    here = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    return torch.empty(here.shape, dtype=here.dtype).copy_(here).view(torch.uint8)
