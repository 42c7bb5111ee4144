"""Digests of tensors and of a whole tracked state, by which two of them are compared.

A tensor on an accelerator is reduced there, and one number comes back for each of its chunks. Invariant: ranks that
hold the same state have the same digest.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
import xxhash

from everstep.checkpoint.state import layouts
from everstep.checkpoint.state.alike import bytes_of_each, first_bytes, to_bytes
from everstep.checkpoint.state.capture import capture
from everstep.checkpoint.state.divided import hyperparameters, is_divided
from everstep.checkpoint.state.sharding import local_of
from everstep.recovery.ddp.reducers import BUCKETS
from everstep.recovery.state.randomness import STATE
from everstep.recovery.state.switches import SWITCHES

CHUNK: Final = 2**20  # numbers that are summed at a time: 8 MiB of weights, and 8 MiB of products
OWN = ("data", STATE, SWITCHES, BUCKETS)  # the session's own entries, on which members agree separately


def state_digests(state: Mapping[str, Any]) -> tuple[int, int]:
    """Digests of 63 bits: of the replicated state (parameters, optimizer state and values), and of its parameters
    alone. They are the same on members that agree. Buffers are left out, because each rank's BatchNorm has its own
    until the next forward pass."""
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
    digest, of_parameters = xxhash.xxh3_64(json.dumps(captured.values, sort_keys=True).encode()), xxhash.xxh3_64()
    for name, tensor in listed:
        first = first_bytes(tensor, most)
        digest.update(first)
        if name in captured.parameters:
            of_parameters.update(first)
    return digest.intdigest() >> 1, of_parameters.intdigest() >> 1


def settles_itself(target: Any) -> bool:
    """Whether members may hold different values of a tracked object, which agrees on them by itself: its class sets
    `everstep_settles = True`."""
    return bool(getattr(target, "everstep_settles", False))


def content(tensor: torch.Tensor) -> int:
    """A digest of the whole part of a tensor that this process holds."""
    here = local(tensor)
    if not layouts.is_dense(here):
        head, parts = layouts.parts_of(here)
        return xxhash.xxh3_64_intdigest(f"{head} {[content(part) for part in parts]}".encode())
    if here.device.type != "cpu":
        return xxhash.xxh3_64_intdigest(to_bytes(reduced(here)))
    return xxhash.xxh3_64_intdigest(to_bytes(here))


def reduced(tensor: torch.Tensor, chunk: int = CHUNK) -> torch.Tensor:
    """One number of 64 bits for each `chunk` numbers of a tensor (at most `CHUNK`), on the tensor's device. They differ
    if the tensor's bits do, or their order, except by rare coincidence; of numbers of at most 32 bits always if one has
    changed, or two have changed places. Strides do not matter."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if len(flat) == 1:  # contiguous for torch with any stride, which halves may not have
        flat = flat.as_strided((1,), (1,))
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # as halves: see `_weights`
    bits = flat.view(kinds[flat.element_size()])
    if not bits.numel():
        return bits.new_empty(0, dtype=torch.int64)
    weights = _weights(tensor.device)
    return torch.stack([(part * weights[: len(part)]).sum() for part in torch.split(bits, chunk)])


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """A random number of 64 bits for each place in a chunk, the same in all processes.

    The lower halves are all different and not 0, because each step of their mixing can be undone (Wellons's
    "lowbias32"). So neither such a half nor a difference of two is divisible by 2**32, nor is a change of a number of
    32 bits: no product of the two is 0 modulo 2**64.
    """
    positions = np.arange(1, CHUNK + 1, dtype=np.uint32)
    low = _mixed(positions)
    high = _mixed(low + np.uint32(0x9E3779B9))
    # The copy is from ordinary memory: it is over when the call returns, so any stream may read it.
    return torch.from_numpy((high.astype(np.uint64) << np.uint64(32) | low).view(np.int64)).to(device)


def _mixed(x: Any) -> Any:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def local(tensor: Any) -> torch.Tensor:
    """The part of a tensor that this process holds."""
    return local_of(tensor.detach())
