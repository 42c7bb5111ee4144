"""Finds this rank's part of a sharded tensor (DTensor: FSDP2, tensor parallelism, HSDP), and its reads from a commit.

The resharding is that of torch DCP's planner (`create_read_items_for_chunk_list`). The boxes are computed here: where
an axis does not divide evenly (7 rows over 3 x 2 ranks), DCP's plan has other boxes than FSDP2 over tensor parallelism.
DCP's writer and reader are not used. Only this module imports `torch.distributed.tensor` and `.checkpoint`, and only
when there is a DTensor, because the import takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.format.boxes import Box, whole
from everstep.checkpoint.format.manifest import Entry
from everstep.torch_private.meshes import root_of

REPLICATE: Final = "replicate"  # that of `Run.mesh`
_RECUT: Final = "redistribute() it to Shard or Replicate, or take a length that the mesh divides"


@dataclass(frozen=True, slots=True)
class Holding:
    """The part of a tensor that this rank holds. `replicas` are all ranks that hold the same part, in order."""

    box: Box
    local: torch.Tensor
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """From `source`, a box of the commit's piece number `piece`, to `target`, a box of the local tensor."""

    piece: int
    source: Box
    target: Box


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor, without importing what defines it."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_of(tensor: Any) -> torch.Tensor:
    """This rank's part of a sharded tensor; any other tensor itself."""
    local: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return local


def holding(name: str, tensor: Any, group: Any = None) -> Holding | None:
    """This rank's part of a DTensor; None if it is not in the tensor's mesh. Ranks are those in `group`."""
    check_placements(name, tensor)
    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if here is None:
        return None
    box = box_at(tuple(tensor.shape), mesh.shape, tensor.placements, here)
    local = tensor.to_local()
    if tuple(local.shape) != box.shape:
        raise StateMismatch(
            f"{name}: holds {tuple(local.shape)} where FSDP would hold {box.shape} by its placements "
            f"{tuple(tensor.placements)}. {_RECUT}"
        )
    same = mesh.mesh[
        tuple(slice(None) if p.is_replicate() else c for p, c in zip(tensor.placements, here, strict=True))
    ]
    ranks = [int(r) for r in _replicas(mesh, same).flatten().tolist()]
    if group is not None:
        ranks = [dist.get_group_rank(group, r) for r in ranks]
    return Holding(box, local, tuple(sorted(ranks)))


def check_placements(name: str, tensor: Any) -> None:
    """Raises `StateMismatch` for a DTensor if a rank's part of it is no box.

    A strided shard takes a part from each of `split_factor` parts. They lie together again only where later dimensions
    of the mesh take one of these parts each, as FSDP over tensor parallelism has it.
    """
    sizes, placements = tensor.device_mesh.shape, tensor.placements
    if any(p.is_partial() for p in placements):
        raise StateMismatch(f"{name}: a DTensor with Partial placement is a sum not yet made; redistribute() it first")
    for at, placement in enumerate(placements):
        parts = getattr(placement, "split_factor", 1)
        if parts == 1 or sizes[at] == 1:
            continue
        later = zip(sizes[at + 1 :], placements[at + 1 :], strict=True)
        if parts != math.prod(size for size, p in later if not p.is_replicate() and p.dim == placement.dim):
            raise StateMismatch(
                f"{name}: a DTensor with placements {tuple(placements)}, of which a rank holds elements that are not "
                "neighbours, as view() and flatten() make one. Give the tensor that it was made of, or redistribute() "
                "it to Shard or Replicate"
            )


def cut_uncertainly(tensor: Any) -> bool:
    """Whether ranks may hold other parts of the tensor than `box_at` computes. If a strided shard's axis does not
    divide evenly, `fully_shard` makes other parts than `distribute_tensor`; on some ranks both make the same part."""
    if not is_sharded(tensor):
        return False
    sizes, placements = tensor.device_mesh.shape, tensor.placements
    for at, placement in enumerate(placements):
        if getattr(placement, "split_factor", 1) > 1 and sizes[at] > 1:
            cuts = (
                n for n, p in zip(sizes, placements, strict=True) if not p.is_replicate() and p.dim == placement.dim
            )
            if tensor.shape[placement.dim] % math.prod(cuts):
                return True
    return False


def elsewhere(names: Sequence[str]) -> str:
    """The error's text on a rank whose own parts are right, while another rank's are not."""
    return f"{', '.join(names[:3])}: another rank holds another part than FSDP would by its placements. {_RECUT}"


def box_at(shape: tuple[int, ...], sizes: Sequence[int], placements: Sequence[Any], coordinate: Sequence[int]) -> Box:
    """The part of a tensor at one coordinate of a mesh whose dimensions have these sizes.

    If several dimensions of the mesh cut one axis, they do so one after the other. Each cuts the part that the one
    before has left into equal parts, of which the last may be shorter or empty (`torch.chunk`). The order is that of
    the mesh, but a strided shard comes after the dimensions that follow it: FSDP cuts the parts of tensor parallelism.
    """
    offset, left = [0] * len(shape), list(shape)
    order: list[int] = []
    for at in reversed(range(len(sizes))):
        strided = getattr(placements[at], "split_factor", 1) > 1 and sizes[at] > 1
        order.insert(len(order) if strided else 0, at)
    for at in order:
        if not placements[at].is_replicate():
            axis = placements[at].dim
            part = -(-left[axis] // sizes[at])
            begin = min(part * coordinate[at], left[axis])
            offset[axis] += begin
            left[axis] = min(part, left[axis] - begin)
    return Box(tuple(offset), tuple(left))


def _replicas(mesh: Any, ranks: torch.Tensor) -> torch.Tensor:
    """The ranks, in all replicas, that hold the same part as `ranks`. With tensor parallelism a tensor's mesh is only
    one replica's part of a larger mesh, whose dimension `REPLICATE` has the other replicas. Ranks along other
    dimensions, such as a pipeline's, hold other tensors."""
    root = root_of(mesh)
    names = root.mesh_dim_names or ()
    if REPLICATE not in names or REPLICATE in (mesh.mesh_dim_names or ()):
        return ranks
    at = names.index(REPLICATE)
    rows = root.mesh.movedim(at, 0).flatten(1)
    replicas: torch.Tensor = rows[:, torch.isin(rows[root.get_coordinate()[at]], ranks)]
    return replicas


def reads(entry: Entry, box: Box) -> list[Read]:
    """The reads from the entry's pieces that make up this box of the tensor."""
    if box == whole(entry.shape):
        return [Read(i, whole(p.shape), Box(p.offset, p.shape)) for i, p in enumerate(entry.pieces)]
    from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list  # noqa: PLC0415

    stored = [ChunkStorageMetadata(torch.Size(p.offset), torch.Size(p.shape)) for p in entry.pieces]
    wanted = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
    metadata = TensorStorageMetadata(TensorProperties(), torch.Size(entry.shape), stored)
    items = create_read_items_for_chunk_list(entry.name, metadata, [wanted])
    result = []
    for item in items:
        assert item.storage_index.index is not None
        lengths = tuple(item.lengths)
        source, target = Box(tuple(item.storage_offsets), lengths), Box(tuple(item.dest_offsets), lengths)
        result.append(Read(item.storage_index.index, source, target))
    return result


def like(tensor: Any, local: torch.Tensor) -> torch.Tensor:
    """A DTensor with this local part, sharded as `tensor` is."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    return DTensor.from_local(
        local.to(tensor.device_mesh.device_type), tensor.device_mesh, tensor.placements,
        run_check=False, shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip


def one_layout(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all of them are sharded, and in the same way."""
    first: Any = tensors[0]
    return all(
        is_sharded(t) and (t.device_mesh, t.placements) == (first.device_mesh, first.placements)  # type: ignore[attr-defined]
        for t in tensors
    )


def placed_as(live: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` sharded as `live` is, if `live` is sharded. `value` is whole, or sharded so already. Not collective."""
    if not is_sharded(live) or is_sharded(value):
        return value
    part = holding("what was read", live)
    if part is None:  # this rank has no part of it
        return live
    return like(live, value[part.box.slices].contiguous())
