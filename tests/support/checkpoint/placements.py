"""DTensors in every placement, saved in one world and loaded in another, in worlds of real processes: see `worlds.py`,
which this program extends.

What a tensor holds follows from its shape. A commit has one tensor for each pair of a layout that saves and a layout
that loads, so two worlds need one save and one load for all pairs. What a rank should have afterwards is cut from the
whole tensor by torch itself.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import everstep
import everstep.checkpoint
from support.checkpoint import worlds
from support.checkpoint.states_held import own_part

Result = dict[str, Any]
Layout = tuple[str, tuple[Placement, ...]]  # a mesh's name, and a placement for each of its dimensions

# Which ranks stand where; the same ranks in another order hold other parts.
MESHES = {
    1: {"line": [0], "square": [[0]]},
    2: {"line": [0, 1], "back": [1, 0], "row": [[0, 1]], "column": [[0], [1]]},
    3: {"line": [0, 1, 2], "turned": [2, 0, 1], "row": [[0, 1, 2]], "column": [[0], [1], [2]]},
    4: {
        "line": [0, 1, 2, 3], "mixed": [2, 0, 3, 1], "row": [[0, 1, 2, 3]], "column": [[0], [1], [2], [3]],
        "square": [[0, 1], [2, 3]], "crossed": [[0, 2], [1, 3]],
    },
}  # fmt: skip
SHAPES = {
    "few": ((4, 4), (5, 3)),  # PyTorch's own, and one that no world divides
    "even": ((4, 4),),
    "uneven": ((5, 3), (7, 1)),
    "deep": ((2, 5, 3),),
    "odd": ((0, 3), (1, 1), (6,), (8,)),
}


@cache
def mesh(name: str) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(MESHES[dist.get_world_size()][name]))


def layouts(size: int, axes: int, few: bool) -> Iterator[Layout]:
    """All placements on all meshes of a world. `few`: those of PyTorch's table, along one axis and on its meshes."""
    parts: list[Placement] = [Replicate(), *(Shard(axis) for axis in range(1 if few else axes))]
    for name, ranks in MESHES[size].items():
        if few and name not in ("line", "row", "square"):
            continue
        yield from ((name, placed) for placed in itertools.product(parts, repeat=torch.tensor(ranks).ndim))
        if size == 4 and name in ("square", "crossed"):  # as FSDP over tensor parallelism shards
            yield name, (_StridedShard(0, split_factor=2), Shard(0))


def held_by(size: int, shape: tuple[int, ...], few: bool) -> list[Layout]:
    """The layouts of a tensor of this shape. torch itself shards strided only what divides evenly."""
    found = layouts(size, len(shape), few)
    return [x for x in found if shape[0] % 4 == 0 or not any(isinstance(p, _StridedShard) for p in x[1])]


def made(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)


def placed(whole: torch.Tensor, layout: Layout) -> DTensor:
    """This rank's part, cut by torch."""
    return distribute_tensor(whole.clone(), mesh(layout[0]), layout[1], src_data_rank=None)


def pairs(sizes: tuple[int, int], side: int, shapes: str) -> Iterator[tuple[str, DTensor]]:
    """For each shape and pair of layouts a name, and what the side that saves (0) or loads (1) has under it."""
    for shape in SHAPES[shapes]:
        both = [held_by(size, shape, shapes == "few") for size in sizes]
        mine = [placed(made(shape), layout) for layout in both[side]]
        for numbers in itertools.product(*(range(len(found)) for found in both)):
            told = " to ".join(f"{both[i][n][0]} {list(both[i][n][1])}" for i, n in enumerate(numbers))
            yield f"{shape}: {told}", mine[numbers[side]]


def placements_save(root: str, shapes: str, sizes: str) -> Result:
    """A commit for each world that will load it. "apart" has a tensor for each pair, "tied" one under many names."""
    size = dist.get_world_size()
    for other in map(int, sizes.split(",")):
        tied = dict(pairs((size, other), 0, shapes))
        state: dict[str, Any] = {"apart": {name: tensor.clone() for name, tensor in tied.items()}}
        state |= {"tied": tied} if shapes == "few" else {}
        with everstep.Checkpointer(f"{root}/{size}-{other}") as run:
            run.restore(state)
            run.save(1, state).wait(200)
        dist.barrier()
    return {}


def placements_load(root: str, shapes: str, sizes: str) -> Result:
    """How many tensors were compared, and which are not what they should be. The tensors themselves are looked at, not
    what stands in the state afterwards."""
    size, count, wrong = dist.get_world_size(), 0, []
    for other in map(int, sizes.split(",")):
        want = dict(pairs((other, size), 1, shapes))
        keys = ("apart", "tied") if shapes == "few" else ("apart",)
        into = {key: {name: _empty(tensor) for name, tensor in want.items()} for key in keys}
        everstep.load(f"{root}/{other}-{size}", {key: dict(tensors) for key, tensors in into.items()})
        for key, (name, tensor) in itertools.product(keys, want.items()):
            count += 1
            if not torch.equal(own_part(tensor), own_part(into[key][name])):
                wrong.append(f"{key}, {other} to {size}, {name}")
    return {"count": count, "wrong": wrong}


def scattered(root: str) -> Result:
    """A tensor whose part here is no box."""
    return _refused(root, distribute_tensor(made((4, 6)), mesh("line"), [Shard(1)]).view(-1))


def otherwise(root: str) -> Result:
    """A tensor that torch has cut otherwise than FSDP would: only the last two ranks can tell by their own parts."""
    grid = DeviceMesh("cpu", torch.arange(6).view(3, 2))
    tensor = distribute_tensor(made((7,)), grid, (_StridedShard(0, split_factor=2), Shard(0)), src_data_rank=None)
    return _refused(root, tensor)


def _refused(root: str, tensor: torch.Tensor) -> Result:
    """What is said of saves and loads of it, and what the loads have changed."""
    told = []
    with everstep.Checkpointer(root) as run, everstep.Checkpointer(f"{root}-union") as other:
        whole = {"t": made(tuple(tensor.shape))}
        run.restore(whole)
        run.save(1, whole).wait(60)
        union = {"t": everstep.Union({"x": tensor})}
        before = own_part(tensor).clone()
        calls: list[Callable[[], object]] = [
            lambda: run.save(2, {"t": tensor}),
            lambda: run.restore({"t": tensor}),
            lambda: everstep.load(root, {"t": tensor}),
            lambda: everstep.load(root, {"t": [tensor]}),
            lambda: (other.restore(union), other.save(1, union)),
        ]
        for call in calls:
            try:
                call()
                told.append("nothing")
            except everstep.checkpoint.CheckpointError as e:
                told.append(f"{type(e).__name__}: {e}")
        return {"told": told, "same": torch.equal(before, own_part(tensor)), "steps": [f.step for f in run.list()]}


def _empty(tensor: DTensor) -> DTensor:
    return DTensor.from_local(
        torch.full_like(tensor.to_local(), -1.0), tensor.device_mesh, tensor.placements, run_check=False,
        shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip


worlds.SCENARIOS.update(placements_save=placements_save, placements_load=placements_load, scattered=scattered,
                        otherwise=otherwise)  # fmt: skip

if __name__ == "__main__":
    print(json.dumps([worlds.world(Path(sys.argv[1]), n, spec) for n, spec in enumerate(sys.argv[2:])]))
