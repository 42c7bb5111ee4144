"""The cases of PyTorch's tests of its distributed checkpoint, in worlds of real processes: see `worlds.py`, which this
program extends. A world saves a model in each division, or loads into each division what other worlds have saved.
"""

import itertools
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import everstep
from support.checkpoint import worlds

Result = dict[str, Any]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns")[: len(shape)])


class Layers(torch.nn.Module):
    """PyTorch's models: three layers that divide evenly, four that do not, and a perceptron of two."""

    SIZES = {"even": (5, 8, 4, 12), "uneven": (5, 10, 15, 30, 5), "perceptron": (10, 16, 10)}  # noqa: RUF012

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes = self.SIZES[kind]
        for number, (into, out) in enumerate(itertools.pairwise(sizes)):
            self.add_module(f"net{number}", torch.nn.Linear(into, out))


KINDS = ("none", "ddp", "fsdp", "hsdp", "tp", "fsdp_tp")


def model_of(kind: str, which: str, seed: int) -> dict[str, Any]:
    """A model and its optimizer, divided as `kind` says."""
    size = dist.get_world_size()
    rows = 2 if size % 2 == 0 else 1
    mesh = mesh_of((rows, size // rows))
    model: torch.nn.Module = Layers(which, seed)
    if kind in ("tp", "fsdp_tp"):
        flat = mesh_of((size,))["rows"] if kind == "tp" else mesh["columns"]
        parallelize_module(model, flat, {"net0": ColwiseParallel(), "net1": RowwiseParallel()})
    if kind in ("fsdp", "hsdp", "fsdp_tp"):
        over = {"fsdp": mesh_of((size,)), "hsdp": mesh, "fsdp_tp": mesh["rows"]}[kind]
        fully_shard(model, mesh=over)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for name, parameter in model.named_parameters():
        number = float(zlib.crc32(name.removeprefix("module.").encode()) % 97 + seed)
        parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": seed}


def models_save(root: str, which: str) -> Result:
    found = {}
    for kind in KINDS:
        state = model_of(kind, which, 1)
        # Tensor parallelism leaves some tensors whole: several ranks hold the same, and nothing in a tensor tells it.
        given = {k: everstep.Union(v) if kind in ("tp", "fsdp_tp") and k != "epoch" else v for k, v in state.items()}
        with everstep.Checkpointer(f"{root}/{dist.get_world_size()}-{kind}") as run:
            run.restore(given)
            run.save(1, given).wait(60)
        dist.barrier()
        found[kind] = worlds.digest(state)
    return found


def models_load(root: str) -> Result:
    found = {}
    for kind, source in itertools.product(KINDS, sorted(p.name for p in Path(root).iterdir())):
        which = Path(root).name
        state = model_of(kind, which, 2)
        everstep.load(f"{root}/{source}", state)
        found[f"{source} to {kind}"] = worlds.digest(state)
    return found


worlds.SCENARIOS.update(models_save=models_save, models_load=models_load)

if __name__ == "__main__":
    print(json.dumps([worlds.world(Path(sys.argv[1]), n, spec) for n, spec in enumerate(sys.argv[2:])]))
