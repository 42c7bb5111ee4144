"""Sends one member's training state to members that are behind or new, from memory to memory.

The state is taken apart as for a checkpoint. So all that a checkpoint can contain can be sent, and nothing is pickled.
Objects of which each rank has its own (random generators) are not sent. Invariant: a receiver's state equals the
holder's, bit by bit, or an error is raised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

from everstep.checkpoint.load.reading import Segment, Task, exchange
from everstep.checkpoint.state.alike import to_bytes
from everstep.checkpoint.state.capture import apply, capture
from everstep.checkpoint.state.sharding import is_sharded
from everstep.recovery.digests import local
from everstep.recovery.group.members import Members
from everstep.recovery.sharding.fsdp import NotRecoverable


class TransferFailed(RuntimeError):
    """The received data differs from the sent data."""


def send(state: Mapping[str, Any], holder: int, receivers: tuple[int, ...], members: Members) -> None:
    """Send the holder's state to the receivers. Collective: every member takes part, because a broadcast reaches
    several members fastest."""
    mine = members.rank == holder
    tensors: dict[str, torch.Tensor] = {}
    buffers: list[Any] = []
    head = b""
    if mine:
        captured = capture(state, members.rank)
        tensors = {name: t.detach() for name, t in captured.tensors.items()}
        if sharded := [name for name, t in tensors.items() if is_sharded(t)]:
            raise NotRecoverable(
                f"{sharded[0]} is sharded, and taken for replicated it would be trained wrong. Shard over the mesh of "
                "run.mesh(shard=N), and pass the module and the optimizer themselves to run.track()"
            )
        buffers = [to_bytes(t) for t in tensors.values()]
        head = _header(captured.values, tensors, buffers)
    described = json.loads(members.from_rank(holder, head))
    if not mine:
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, kind)) for name, kind, shape, _ in described["tensors"]
        }
        buffers = [to_bytes(t) for t in tensors.values()]
    tasks = [Task(0, i, (Segment(0, len(b), i, 0),)) for i, b in enumerate(buffers) if len(b)]
    divided: list[list[Task]] = [tasks if rank == holder else [] for rank in range(members.world_size)]
    exchange(divided, buffers, members)
    if members.rank in receivers:
        for (name, _, _, checksum), data in zip(described["tensors"], buffers, strict=True):
            if xxhash.xxh3_64_hexdigest(data) != checksum:
                raise TransferFailed(f"{name}: what arrived from rank {holder} fails its checksum")
        apply(state, {"state": described["values"]}, tensors, members.rank)


def _header(values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], buffers: Sequence[Any]) -> bytes:
    listed = [
        (name, str(t.dtype).removeprefix("torch."), list(t.shape), xxhash.xxh3_64_hexdigest(data))
        for (name, t), data in zip(tensors.items(), buffers, strict=True)
    ]
    return json.dumps({"values": values, "tensors": listed}).encode()


def local_bytes(tensor: torch.Tensor) -> Any:
    """The bytes of this process's part of a tensor."""
    return to_bytes(local(tensor))
