"""Sends shards between members, from memory to memory: only what a receiver needs, and from one sender only.

As in `broadcast`, the state is taken apart as for a checkpoint, nothing is pickled, and each tensor has a checksum. All
senders send at once, in blocks, each to its receivers. Invariant: a receiver's state does not change before all of the
new one has arrived and was checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import xxhash

from everstep.checkpoint.state.capture import apply, capture
from everstep.checkpoint.state.sharding import is_sharded
from everstep.recovery.group.members import Members
from everstep.recovery.sharding.fsdp import is_offloaded
from everstep.recovery.transfer.broadcast import TransferFailed, local_bytes

BLOCK: Final = 16 * 2**20  # bytes to one receiver at a time


@dataclass(frozen=True, slots=True)
class ReceivedShard:
    """The data that has arrived from `sender`."""

    sender: int
    values: Mapping[str, Any]
    described: Sequence[Any]
    body: torch.Tensor

    @property
    def size(self) -> int:
        return self.body.numel()


def exchange(
    state: Mapping[str, Any], transfers: Sequence[tuple[int, int]], device_mesh: Any, members: Members
) -> ReceivedShard | None:
    """Send and receive according to `transfers`, (receiver, sender). Returns what this rank received. Collective.
    Raises `PeerLost`, `TransferFailed`."""
    mine = [receiver for receiver, sender in transfers if sender == members.rank]
    sender = next((g for receiver, g in transfers if receiver == members.rank), None)
    head, body = _pack(state, device_mesh, members.rank) if mine else (b"", _Body([]))
    told = members.gather((len(head), body.size))
    heading = _deliver(_Body([memoryview(head)]), mine, sender, [h for h, _ in told], members)
    content = _deliver(body, mine, sender, [b for _, b in told], members)
    if sender is None:
        return None
    described = json.loads(bytes(heading.numpy()))
    received = ReceivedShard(sender, described["values"], described["tensors"], content)
    _check(received)
    return received


def unpack(state: Mapping[str, Any], received: ReceivedShard, device_mesh: Any, rank: int) -> None:
    """Load the received data into `state`, whose shard has the sender's number."""
    tensors: dict[str, torch.Tensor] = {}
    device = "cpu" if is_offloaded(state) else device_mesh.device_type  # the accelerator may lack the room
    at = 0
    for name, kind, local, whole, _ in received.described:
        dtype = getattr(torch, kind)
        size = dtype.itemsize * torch.Size(local).numel()
        # The bytes are copied, because a view needs an address that is aligned for its type.
        tensor = torch.empty(local, dtype=dtype)
        if size:
            tensor.view(-1).view(torch.uint8).copy_(received.body[at : at + size])
        tensors[name] = tensor if whole is None else _sharded(tensor.to(device), whole, device_mesh)
        at += size
    apply(state, {"state": received.values}, tensors, rank)


def _pack(state: Mapping[str, Any], device_mesh: Any, rank: int) -> tuple[bytes, _Body]:
    captured = capture(state, rank)
    listed, buffers = [], []
    for name, tensor in captured.tensors.items():
        data = local_bytes(tensor)
        here = tensor.detach()
        whole = None
        if is_sharded(tensor):
            if tensor.device_mesh != device_mesh:  # type: ignore[attr-defined]
                raise TransferFailed(f"{name} is not sharded over the mesh of run.mesh()")
            whole = [list(here.shape), list(here.stride()), [_spell(name, p) for p in here.placements]]  # type: ignore[attr-defined]
            here = here.to_local()  # type: ignore[attr-defined]
        kind = str(here.dtype).removeprefix("torch.")
        listed.append((name, kind, list(here.shape), whole, xxhash.xxh3_64_hexdigest(data)))
        buffers.append(memoryview(data))
    return json.dumps({"values": captured.values, "tensors": listed}).encode(), _Body(buffers)


def _spell(name: str, placement: Any) -> int | None:
    """The axis that is sharded; None for a replicated tensor."""
    if placement.is_replicate():
        return None
    if type(placement).__name__ != "Shard":
        raise TransferFailed(f"{name}: placement {placement} cannot be sent: it does not shard by axis")
    axis: int = placement.dim
    return axis


def _sharded(local: torch.Tensor, whole: Any, device_mesh: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415  costs seconds

    shape, stride, axes = whole
    placements = [Replicate() if axis is None else Shard(axis) for axis in axes]
    found: torch.Tensor = DTensor.from_local(
        local, device_mesh, placements,
        run_check=False, shape=torch.Size(shape), stride=tuple(stride),
    )  # fmt: skip
    return found


def _check(received: ReceivedShard) -> None:
    at = 0
    for name, kind, local, _, said in received.described:
        size = getattr(torch, kind).itemsize * torch.Size(local).numel()
        if xxhash.xxh3_64_hexdigest(_view(received.body[at : at + size])) != said:
            raise TransferFailed(f"{name}: what arrived from rank {received.sender} fails its checksum")
        at += size
    if at != received.size:
        raise TransferFailed(f"{received.size} bytes arrived from rank {received.sender}, {at} were described")


class _Body:
    """Several buffers as one sequence of bytes."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self.size = sum(b.nbytes for b in buffers)
        self._number = self._into = 0

    def take(self, most: int) -> torch.Tensor:
        """The next bytes, at most `most` of them."""
        found = torch.empty(min(most, self.size), dtype=torch.uint8)
        self.size -= found.numel()
        place, at = memoryview(_view(found)), 0
        while at < len(place):
            buffer = self._buffers[self._number]
            part = buffer[self._into : self._into + len(place) - at]
            place[at : at + part.nbytes] = part
            at, self._into = at + part.nbytes, self._into + part.nbytes
            if self._into == buffer.nbytes:
                self._number, self._into = self._number + 1, 0
        return found


def _view(data: torch.Tensor) -> Any:
    return data.numpy()


def _deliver(
    body: _Body, receivers: Sequence[int], sender: int | None, sizes: Sequence[int], members: Members
) -> torch.Tensor:
    """Send `body` to each of `receivers`. Return what `sender` sent here. `sizes`: the sizes of all ranks' bodies."""
    arrived = torch.empty(sizes[sender] if sender is not None else 0, dtype=torch.uint8)
    for at in range(0, max(sizes), BLOCK):
        block = body.take(BLOCK)
        out_sizes, in_sizes = [0] * members.world_size, [0] * members.world_size
        for receiver in receivers:
            out_sizes[receiver] = block.numel()
        if sender is not None:
            in_sizes[sender] = max(0, min(BLOCK, sizes[sender] - at))
        place = arrived[at : at + sum(in_sizes)]
        outgoing = block.repeat(len(receivers)) if len(receivers) != 1 else block
        members.group.alltoall_base(place, outgoing, in_sizes, out_sizes).wait()
    return arrived
