"""Which tensors lie in the same memory, and what becomes of a load into them.

Knows tensors and where they are, nothing of trees. Invariant: what is one number in memory is not given two values
without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.sharding import is_sharded


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
    spans = sorted((*span(tensor), name) for name, tensor in tensors.items() if not is_sharded(tensor))
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
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return torch.equal(_row(one), _row(other))


def check_ties(
    live: Mapping[str, Sequence[str]], owners: Collection[str], tensors: Mapping[str, torch.Tensor], ranks: Ranks
) -> None:
    """Raises `StateMismatch` if one tensor of `owners` is to get several of the commit's tensors that are not the same:
    weights that are tied now, and were not when they were saved. On all ranks if one of them has such a one; before
    anything is filled. Collective. `live`: the state's tensors that each of the commit's goes into."""
    sources: dict[str, list[str]] = {}
    for name, owns in live.items():
        for own in set(owns) & set(owners):
            sources.setdefault(own, []).append(name)
    odd = []
    for own, names in sorted(sources.items()):
        held = [(name, _local(tensors[name])) for name in sorted(names) if name in tensors]
        for name, tensor in held[1:]:
            first, known = held[0]
            if known.shape == tensor.shape and known.dtype == tensor.dtype and not same_bits(known, tensor):
                odd.append(
                    f"{own}: is tied in the state passed, and the commit holds {first} and {name} with different values"
                )
    if ranks.maximum(int(bool(odd))):
        text = "; ".join(odd[:3]) or "tied tensors would get two values on another rank, which names them"
        raise StateMismatch(f"{text}. Nothing was changed. Untie them, or leave all but one out with exclude=")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor in the order of its elements, on the CPU."""
    here = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    return torch.empty(here.shape, dtype=here.dtype).copy_(here).view(torch.uint8)
