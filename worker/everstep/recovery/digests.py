"""Digests of tensors and of a whole tracked state, by which two of them are compared.

A tensor on an accelerator is reduced there, and 64 numbers come back. Invariant: ranks that hold the same state have
the same digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from everstep.checkpoint.state.alike import bytes_of_each, first_bytes, to_bytes
from everstep.checkpoint.state.capture import capture
from everstep.checkpoint.state.divided import hyperparameters, is_divided
from everstep.checkpoint.state.sharding import local_of
from everstep.recovery.ddp.reducers import BUCKETS
from everstep.recovery.state.randomness import STATE
from everstep.recovery.state.switches import SWITCHES

COLUMNS = 64
OWN = ("data", STATE, SWITCHES, BUCKETS)  # the session's own entries, on which members agree separately


def state_digest(state: Mapping[str, Any]) -> int:
    """A digest of 63 bits of the replicated state: parameters, optimizer state and values. It is the same on members
    that agree. Buffers are left out, because each rank's BatchNorm has its own until the next forward pass."""
    compared = {k: t for k, t in state.items() if k not in OWN and not settles_itself(t)}
    # Each rank has another part of a divided optimizer's state.
    compared |= {k: hyperparameters(t) for k, t in compared.items() if is_divided(t)}
    captured = capture(compared, 0)
    buffers = {
        name for key, t in state.items() if isinstance(t, torch.nn.Module)
        for name in captured.tensors if name.startswith(f"{key}/") and name not in captured.parameters
    }  # fmt: skip
    listed = [(name, local(t)) for name, t in sorted(captured.tensors.items()) if name not in buffers]
    most = bytes_of_each([t for _, t in listed])
    found = xxhash.xxh3_64(json.dumps(captured.values, sort_keys=True).encode())
    for _, tensor in listed:
        found.update(first_bytes(tensor, most))
    return found.intdigest() >> 1


def settles_itself(target: Any) -> bool:
    """Whether members may hold different values of a tracked object, which agrees on them by itself: its class sets
    `everstep_settles = True`."""
    return bool(getattr(target, "everstep_settles", False))


def content(tensor: torch.Tensor) -> int:
    """A digest of the whole part of a tensor that this process holds."""
    found = local(tensor)
    if found.layout is not torch.strided:
        return 0
    if found.device.type != "cpu":
        return xxhash.xxh3_64_intdigest(to_bytes(reduced(found)))
    return xxhash.xxh3_64_intdigest(to_bytes(found))


def reduced(tensor: torch.Tensor) -> torch.Tensor:
    """At most 128 numbers, on the tensor's device. They differ if the tensor's bits do, except by rare coincidence."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(kinds[flat.element_size()])
    whole = bits.numel() // COLUMNS * COLUMNS
    return torch.cat([bits[:whole].view(-1, COLUMNS).sum(0, dtype=torch.int64), bits[whole:].to(torch.int64)])


def local(tensor: Any) -> torch.Tensor:
    """The part of a tensor that this process holds."""
    return local_of(tensor.detach())
