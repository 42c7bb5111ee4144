"""What a commit holds of a value, and where two values differ: by rules of its own, for tests of all kinds of states.

Of a tensor that is cut (DTensor) every process must ask at once: its parts are brought together.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Any) -> torch.Tensor:
    """Of a DTensor, also where torch's types call it a Tensor."""
    part: torch.Tensor = tensor.to_local()
    return part


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process has: of one that is not cut, all of it."""
    return local(tensor.detach()) if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor. Collective for one that is cut: torch gathers not all dtypes, so the bytes are gathered."""
    if not isinstance(tensor, DTensor):
        return tensor
    part = own_part(tensor)
    _, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    mine = (tuple(begin), tuple(part.shape), bytes_of(part))
    told: list[Any] = [mine] * dist.get_world_size()
    if len(told) > 1:
        dist.all_gather_object(told, mine)
    found = torch.zeros(tensor.shape, dtype=tensor.dtype)
    for offset, shape, content in told:
        if content:
            place = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            found[place] = torch.frombuffer(bytearray(content), dtype=tensor.dtype).view(shape)
    return found


def shows_twice(tensor: torch.Tensor) -> bool:
    tensor = own_part(tensor)
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + torch.arange(size) * stride).reshape(-1)
    return len(places) != len(set(places.tolist()))


def held(value: Any) -> Any:
    """What `everstep.load` without a state gives for a value."""
    if hasattr(value, "state_dict"):
        return held(dict(value.state_dict()))
    if isinstance(value, torch.Tensor):
        return whole(value).detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    if isinstance(value, np.ndarray):
        return np.array(value, dtype=value.dtype.newbyteorder("="))
    if isinstance(value, Mapping):
        return {held(key): held(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(held(item) for item in value)
    if isinstance(value, list):
        return [held(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.generic):
        return value.item()
    return bytes(value) if isinstance(value, bytearray) else value


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two values differ in type, form or bits. NaN is NaN where it is Python's; of tensors each bit counts.
    What `a` is of cannot be filled where an element shows twice, or an array is fixed: then `b` is a plain one."""
    if not fillable(a):
        a = held(a)
    if type(a) is not type(b):
        return [f"{path}: {type(a)} and {type(b)}"]
    if isinstance(a, torch.Tensor):
        alike = (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        return [] if alike and bytes_of(whole(a)) == bytes_of(whole(b)) else [f"{path}: {a} and {b}"]
    if isinstance(a, np.ndarray):
        alike = (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
        return [] if alike else [f"{path}: {a!r} and {b!r}"]
    if isinstance(a, Mapping):
        own, other = list(a.items()), list(b.items())
        if len(own) != len(other):
            return [f"{path}: keys {list(a)} and {list(b)}"]
        return [
            text
            for (k, v), (m, w) in zip(own, other, strict=True)
            for text in differences(k, m, f"{path}/key {k!r}") + differences(v, w, f"{path}/{k!r}")
        ]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{path}: {len(a)} and {len(b)} items"]
        return [t for i, (x, y) in enumerate(zip(a, b, strict=True)) for t in differences(x, y, f"{path}/{i}")]
    if isinstance(a, float | np.floating):
        # The sign of zero counts. NaN comes back as NaN.
        alike = struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    else:
        alike = a == b
    return [] if alike else [f"{path}: {a!r} and {b!r}"]


def fillable(value: Any) -> bool:
    """Whether a tensor or array can be written to."""
    if isinstance(value, np.ndarray):
        return bool(value.flags.writeable)
    return not isinstance(value, torch.Tensor) or not shows_twice(value)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Those of a tensor that is not cut, in the order of its elements."""
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().reshape(-1)
    plain = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)  # of the strides that a row of bytes has
    return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""
