"""Models that are divided in one way and loaded in another, in worlds of real processes: see `unions.py`, which this
program extends. Pipeline stages, experts beside FSDP2, FSDP2, HSDP and the whole; a model that is tuned on top of
another; a state read whole by some ranks; and an fsspec file system that this project knows nothing of.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import everstep
from everstep.storage import open_store
from support.checkpoint import tables, unions, worlds
from support.checkpoint.pieces import register

State = dict[str, Any]
Result = dict[str, Any]


def stages(seed: int) -> State:
    rank, size = dist.get_rank(), dist.get_world_size()
    return unions.with_optimizer(
        unions.Part(unions.mine(unions.LAYERS, rank, size), unions.mine(unions.EXPERTS, rank, size), seed)
    )


def experts(seed: int) -> State:
    """An expert on the ranks of its group alone, sharded over them; the rest over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = 2 if size % 2 == 0 else 1
    mesh = tables.mesh_of((groups, size // groups))
    model = unions.Part(range(unions.LAYERS), range(rank // (size // groups), unions.EXPERTS, groups), seed)
    for expert in model.experts.values():
        fully_shard(expert, mesh=mesh["columns"])
    fully_shard(model, mesh=tables.mesh_of((size,)))
    return unions.with_optimizer(model)


def _sharded(seed: int, shape: tuple[int, ...]) -> State:
    model, mesh = unions.Part(range(unions.LAYERS), range(unions.EXPERTS), seed), tables.mesh_of(shape)
    for layer in (*model.layers.values(), *model.experts.values(), model):
        fully_shard(layer, mesh=mesh)
    return unions.with_optimizer(model)


def fsdp(seed: int) -> State:
    return _sharded(seed, (dist.get_world_size(),))


def hsdp(seed: int) -> State:
    size = dist.get_world_size()
    return _sharded(seed, (2, size // 2) if size % 2 == 0 else (1, size))


def whole(seed: int) -> State:
    return unions.with_optimizer(unions.Part(range(unions.LAYERS), range(unions.EXPERTS), seed))


WAYS: dict[str, Callable[[int], State]] = {
    "stages": stages, "experts": experts, "fsdp": fsdp, "hsdp": hsdp, "whole": whole,
}  # fmt: skip


def divisions_save(root: str) -> Result:
    for way, made in WAYS.items():
        state = made(1)
        with everstep.Checkpointer(f"{root}/{dist.get_world_size()}-{way}") as run:
            run.restore(state)
            unions.step(state)
            run.save(1, state).wait(60)
        dist.barrier()
    return {"told": unions.told(state)}  # of the whole


def divisions_load(root: str) -> Result:
    """What each rank has after each load. A rank that holds all names needs no mark."""
    found = {}
    for way, source in itertools.product(WAYS, sorted(path.name for path in Path(root).iterdir())):
        state = WAYS[way](2)
        plain = way not in ("stages", "experts")
        into = {k: v.target if plain and isinstance(v, everstep.Union) else v for k, v in state.items()}
        everstep.load(f"{root}/{source}", into)
        found[f"{source} to {way}"] = unions.told({**state, "epoch": into["epoch"]})
    return {"told": found}


# --- a model on top of another that was trained before


class Tuned(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body = tables.Layers("uneven", seed)
        self.head = torch.nn.Linear(5, 3)
        self.body.requires_grad_(False)
        for part in (self.body, self):
            fully_shard(part, mesh=tables.mesh_of((dist.get_world_size(),)))


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.Adam(parameters, lr=0.1)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, float(number + 1))
    optimizer.step()
    return optimizer


def pretrained(root: str) -> Result:
    state = tables.model_of("fsdp", "uneven", 1)
    with everstep.Checkpointer(f"{root}/pretrained") as run:
        run.restore(state)
        run.save(1, state).wait(60)
    return {"body": _digest(state["model"])}


def tune(root: str) -> Result:
    """Tune the head on the body that was trained by another world, save all or the head alone, and begin anew."""
    size = dist.get_world_size()
    model = Tuned(2)
    head = _digest(model.head)
    everstep.load(f"{root}/pretrained", {"model": model.body})
    told = {"body": _digest(model.body), "head": _digest(model.head) == head}
    optimizer = trained(model)
    for name, part in (("all", model), ("head", model.head)):
        with everstep.Checkpointer(f"{root}/tuned-{size}-{name}") as run:
            run.restore({"model": part, "optimizer": optimizer})
            run.save(1, {"model": part, "optimizer": optimizer}).wait(60)
    dist.barrier()
    resumed = {}
    for source in sorted(path.name for path in Path(root).glob("tuned-*")):
        again = Tuned(3)
        everstep.load(f"{root}/pretrained", {"model": again.body})
        part = again.head if source.endswith("head") else again
        fresh = torch.optim.Adam(again.head.parameters(), lr=0.1)
        everstep.load(f"{root}/{source}", {"model": part, "optimizer": fresh})
        trained(again, fresh)
        resumed[source] = _digest(again)
    trained(model, optimizer)
    return {**told, "on": _digest(model), "resumed": resumed}


def _digest(model: torch.nn.Module) -> str:
    return worlds.digest({"model": model, "optimizer": torch.optim.SGD(model.parameters()), "epoch": 0})


# --- a state that some ranks read whole


def gathered(root: str) -> Result:
    """Sharded tensors of which each rank made its own part, in lists and beside plain ones: whole, and on the CPU."""
    size, mesh = dist.get_world_size(), tables.mesh_of((dist.get_world_size(),))

    def part(number: int, rank: int) -> torch.Tensor:
        return unions.made(number, f"of rank {rank}", torch.empty(3, 3, 3))

    sharded = [DTensor.from_local(part(i, dist.get_rank()), mesh, [Shard(0)]) for i in range(4)]
    plain: State = {"arange": torch.arange(10), "step": torch.tensor(7.0), "lr": 1.5, "bytes": b"\0as is", "of": [1, 2]}
    with everstep.Checkpointer(root) as run:
        state = {
            "nested": {"local": sharded[0], "list": [v for t in sharded[1:] for v in (t, torch.ones(10))], **plain}
        }
        run.restore(state)
        run.save(1, state).wait(60)
    dist.barrier()
    if dist.get_rank() % 2:
        return {"same": True}  # a load without a state is each rank's own affair
    full = [torch.cat([part(i, rank) for rank in range(size)]) for i in range(4)]
    want = {"local": full[0], "list": [v for t in full[1:] for v in (t, torch.ones(10))], **plain}
    return {"same": _same(everstep.load(root).state["nested"], want)}


def _same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return type(one) is torch.Tensor and one.device.type == "cpu" and torch.equal(one, other)
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], value) for key, value in other.items())
    if isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


# --- a file system of somebody else's


def elsewhere(root: str, scheme: str) -> Result:
    """Two commits through fsspec: the second does not touch the first, and a model that is sharded anew has each.

    Each file is visible for a while before it is whole, and rank 0 looks while the others still write."""
    register()
    pause = 0.02 * (1 + dist.get_rank())
    options = {"auto_mkdir": True, "between": lambda: time.sleep(pause)}
    store = open_store(f"{scheme}://{root}", options, single_committer=True)
    state, digests = tables.model_of("fsdp", "uneven", 1), {}
    with everstep.Checkpointer(store=store) as run:
        run.restore(state)
        for step in (1, 2):
            state["epoch"] = step
            trained(state["model"], state["optimizer"])
            run.save(step, state).wait(60)
            digests[step] = worlds.digest(state)
            dist.barrier()
    same = []
    for named in (1, 2, None):
        again = tables.model_of("hsdp", "uneven", 2)
        everstep.load(store=store, state=again, step=named)
        same.append(worlds.digest(again) == digests[named or 2])
    return {"same": same}


worlds.SCENARIOS.update(
    divisions_save=divisions_save, divisions_load=divisions_load, pretrained=pretrained, tune=tune, gathered=gathered,
    elsewhere=elsewhere,
)  # fmt: skip

if __name__ == "__main__":
    print(json.dumps([worlds.world(Path(sys.argv[1]), n, spec) for n, spec in enumerate(sys.argv[2:])]))
