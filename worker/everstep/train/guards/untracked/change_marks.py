"""Finds out whether an object has changed since the last look, without a copy of it.

A tensor's mark is a digest of a part of its bytes, together with the version that torch counts with each write. Both
are needed: `.data` and numpy write without counting, and a write may miss the part. The cost is bounded: `HEAD` and
`SPREAD` bytes of each tensor, and one copy from each device. Not every write changes a value: DDP sends a constant
buffer again before each forward pass. So if a tensor was written to and its part is the same, all its bytes are
digested, from the first such write on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.nn.parameter import is_lazy

from everstep.checkpoint.state import layouts
from everstep.checkpoint.state.alike import to_bytes
from everstep.checkpoint.state.sharding import is_sharded
from everstep.train.guards.script_objects import Generator

HEAD = 4096
SPREAD = 1024


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark. `whole`: the digest covers all bytes. `full`: the digest of all bytes, if it was asked for."""

    identity: int
    shape: tuple[int, ...]
    digest: int
    version: int
    whole: bool
    full: int | None = None

    def moved_to(self, now: Mark) -> bool:
        """Whether the values have changed, as far as the marks show."""
        if (self.shape, self.digest) != (now.shape, now.digest):
            return True
        return self.full is not None and now.full is not None and self.full != now.full

    def written_to(self, now: Mark) -> bool:
        """Whether the same tensor was written to, although its digested part is the same."""
        return not now.whole and self.identity == now.identity and self.version != now.version


def marks_of(tensors: Sequence[torch.Tensor]) -> list[Mark | None]:
    """The tensors' marks, in order. None: the tensor has no bytes to look at (lazy, meta, sparse)."""
    found: list[Mark | None] = [None] * len(tensors)
    parts: dict[torch.device, list[tuple[int, torch.Tensor, bool]]] = {}
    with torch.no_grad():
        for i, tensor in enumerate(tensors):
            part = _part(tensor)
            if part is not None:
                parts.setdefault(part[0].device, []).append((i, *part))
        for device, listed in parts.items():
            # Parts on another device are copied in one piece, because each copy waits for the device.
            data = torch.cat([part for _, part, _ in listed]) if device.type != "cpu" else None
            flat: Any = data.cpu().numpy() if data is not None else None
            at = 0
            for i, piece, whole in listed:
                own: Any = piece.numpy() if flat is None else flat[at : at + piece.numel()]
                at += piece.numel()
                tensor = tensors[i]
                found[i] = Mark(id(tensor), tuple(tensor.shape), xxhash.xxh3_64_intdigest(own), _version(tensor), whole)
    return found


def mark_of_array(array: np.ndarray[Any, Any]) -> Mark | None:
    """The mark of an array. None: it holds objects, or is large and no plain block of memory."""
    if array.dtype.hasobject or not (array.flags.c_contiguous or array.nbytes <= 2**16):
        return None
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = len(data) <= HEAD + SPREAD
    part: Any = data if whole else np.concatenate([data[:HEAD], data[:: len(data) // SPREAD]])
    return Mark(id(array), array.shape, xxhash.xxh3_64_intdigest(part), 0, whole)


def state_of_generator(generator: Generator) -> int:
    """A digest of the generator's state."""
    if isinstance(generator, torch.Generator):
        data: Any = generator.get_state().numpy()
        return xxhash.xxh3_64_intdigest(data)
    if isinstance(generator, np.random.Generator):
        return hash(repr(generator.bit_generator.state))
    if isinstance(generator, random.SystemRandom):
        return 0  # it has no state
    return hash(repr(generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()))


def full_digest(tensor: torch.Tensor) -> int:
    """A digest of all bytes of a tensor."""
    local: Any = tensor.detach()
    if is_sharded(tensor):
        local = local.to_local()
    return xxhash.xxh3_64_intdigest(to_bytes(local))


def _part(tensor: torch.Tensor) -> tuple[torch.Tensor, bool] | None:
    """The bytes of a tensor that are digested, and whether these are all. On the CPU they are a view."""
    if is_lazy(tensor) or not layouts.is_dense(tensor):
        return None
    local: Any = tensor.detach()
    if is_sharded(tensor):
        local = local.to_local()
    size = local.numel() * local.element_size()
    if not size:
        return None
    if not local.is_contiguous():
        if size > HEAD + SPREAD:
            return local.reshape(-1)[:1].view(torch.uint8) if local.dim() == 0 else _corner(local), False
        local = local.contiguous()
    data = torch.empty(0, dtype=torch.uint8, device=local.device).set_(
        local.untyped_storage(), local.storage_offset() * local.element_size(), (size,), (1,)
    )
    if size <= HEAD + SPREAD:
        return data, True
    return torch.cat([data[:HEAD], data[HEAD :: size // SPREAD]]), False


def _corner(tensor: torch.Tensor) -> torch.Tensor:
    """A small contiguous block of a tensor that is not contiguous."""
    for axis in range(tensor.dim()):
        tensor = tensor.narrow(axis, 0, min(tensor.shape[axis], 8))
    found: torch.Tensor = tensor.contiguous().reshape(-1)[: HEAD // tensor.element_size()]
    return found.view(torch.uint8)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
