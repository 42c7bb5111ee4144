"""Tensors that are no dense rows of numbers: sparse, nested, quantized, of mkldnn, or on the meta device.

A commit holds dense tensors only. Others may be buffers that are not saved, and are compared and put back like those.
Invariant: two tensors have equal bytes exactly if they have the same layout, shape, types and stored elements. Of
sparse tensors that is what is stored: an explicit zero is an element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from everstep.checkpoint.state.sharding import local_of
from everstep.torch_private.tensors import below_subclasses

# --- memory
# Finds the memory ranges of tensors, and whether tensors share memory. It knows tensors and their addresses, nothing of
# trees.


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
    reach = 0  # the largest offset within the axes before; an axis with a larger stride cannot repeat an element
    for stride, size in steps:
        if not stride:
            return True
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    offsets = torch.zeros(1, dtype=torch.int64)
    for stride, size in steps:
        offsets = (offsets[:, None] + torch.arange(size) * stride).view(-1)
    offsets = offsets.sort().values
    return bool((offsets[1:] == offsets[:-1]).any())


def crossed(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of the tensors that share some memory with another one."""
    spans = sorted((*span(local_of(tensor)), name) for name, tensor in tensors.items())
    names: set[str] = set()
    reach, widest = 0, ""  # the furthest end so far, and the name of its tensor
    for begin, end, name in spans:
        if begin < min(reach, end):
            names |= {widest, name}
        if end > reach:
            reach, widest = end, name
    return names


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same."""
    with torch.no_grad(), below_subclasses():
        return torch.equal(row_of(left), row_of(right))


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor in the order of its elements, on the CPU."""
    here = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    return torch.empty(here.shape, dtype=here.dtype).copy_(here).view(torch.uint8)


# --- layouts

_COMPRESSED_ROWS: Final = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_COLUMNS: Final = (torch.sparse_csc, torch.sparse_bsc)
# torch cannot copy tensors of these types.
_PACKED: Final = (torch.quint4x2, torch.quint2x4)
_KEEP_DENSE: Final = (
    "Keep a dense tensor in its place, and make the other from it in forward(); or register it with persistent=False "
    "and make it when the module is made, if it never changes"
)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor has strides, and its bytes are those of its elements."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def is_copied(tensor: torch.Tensor) -> bool:
    """Whether torch can copy the tensor."""
    return tensor.dtype not in _PACKED


def kind_of(tensor: torch.Tensor) -> str:
    """A description of the tensor's kind for an error's text."""
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values"
    kind = "a nested" if tensor.is_nested else "a quantized" if tensor.is_quantized else "a"
    return f"{kind} {tensor.dtype} tensor of layout {tensor.layout}"


def advice(tensor: torch.Tensor) -> str:
    """What to save instead of the tensor, for an error's text."""
    if tensor.is_meta:
        return "Give it memory and values before it is tracked: module.to_empty(device=…), then its reset_parameters()"
    if tensor.is_nested:
        return f"Nested tensors have no dense form of the same content: save .values() and .offsets(). {_KEEP_DENSE}"
    how = ".dequantize(), or .int_repr() with its scales" if tensor.is_quantized else ".to_dense()"
    return f"Its dense form is {how}. {_KEEP_DENSE}"


def parts_of(tensor: torch.Tensor) -> tuple[str, list[torch.Tensor]]:
    """A description of the tensor, and the dense tensors that it consists of: equal for equal tensors, on all ranks."""
    tensor = tensor.detach()
    head = f"{tensor.layout} {tensor.dtype}"
    if tensor.is_nested:
        each = [part.contiguous() for part in tensor.unbind()]
        return f"nested {head} {[tuple(part.shape) for part in each]}", each
    head = f"{head} {tuple(tensor.shape)}"
    if tensor.is_meta:
        return f"meta {head}", []
    if tensor.is_quantized:
        return _quantized(head, tensor)
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        parts = [whole.indices(), whole.values()]
    elif tensor.layout in _COMPRESSED_ROWS:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in _COMPRESSED_COLUMNS:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = [tensor if tensor.layout is torch.strided else tensor.to_dense()]
    return f"{head} {[(str(part.dtype), tuple(part.shape)) for part in parts]}", parts


def _quantized(head: str, tensor: torch.Tensor) -> tuple[str, list[torch.Tensor]]:
    quantized: Any = tensor  # torch's stubs know these methods as returning anything
    head = f"{head} {tensor.qscheme()}"
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{head} {quantized.q_scale()!r} {quantized.q_zero_point()}", [quantized.int_repr()]
    scales, zeros = quantized.q_per_channel_scales(), quantized.q_per_channel_zero_points()
    return f"{head} {quantized.q_per_channel_axis()}", [quantized.int_repr(), scales, zeros]


def size_of(tensor: torch.Tensor) -> int:
    """The bytes of a dense copy, about."""
    return 0 if tensor.is_meta else tensor.numel() * tensor.element_size()


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor that is not dense the values of another one like it, of the same layout."""
    if tensor.layout is torch.jagged or tensor.layout in (*_COMPRESSED_ROWS, *_COMPRESSED_COLUMNS):
        tensor.copy_(values)  # `data` of these cannot be set, and torch raises nothing
    else:
        tensor.data = values.detach().clone()  # `copy_` wants as many stored elements, or the same scale
