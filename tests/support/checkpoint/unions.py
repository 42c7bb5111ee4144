"""States of which ranks hold different names, in worlds of real processes: see `worlds.py`, which this program extends.

What a tensor holds follows from its name and a seed, so any rank can tell what any other saved.
"""

import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import everstep
import everstep.checkpoint
from support.checkpoint import worlds

State = dict[str, Any]
Result = dict[str, Any]
LAYERS, EXPERTS = 6, 8


class Part(torch.nn.Module):
    """Some layers and experts of a model, under the names that they have in the whole."""

    def __init__(self, layers: Iterable[int], experts: Iterable[int], seed: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({str(i): torch.nn.Linear(6, 5 + i) for i in layers})
        self.experts = torch.nn.ModuleDict({str(i): torch.nn.Linear(4, 7) for i in experts})
        self.norm = torch.nn.BatchNorm1d(3)
        for name, parameter in self.named_parameters():
            parameter.data = made(seed, name, parameter)


def made(seed: int, name: str, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(like.shape, generator=generator)


def mine(count: int, rank: int, parts: int) -> range:
    """A contiguous part of `count`, as pipeline stages are cut."""
    return range(count * rank // parts, count * (rank + 1) // parts)


def with_optimizer(model: torch.nn.Module, **more: Any) -> State:
    """Ranks group their parameters otherwise, and in another order."""
    named = list(model.named_parameters())
    flip = dist.get_rank() % 2 == 1
    groups = [
        {"params": [p for n, p in named if n.endswith(kind)], "lr": lr} for kind, lr in (("weight", 0.3), ("bias", 0.2))
    ]
    optimizer = torch.optim.AdamW(groups[::-1] if flip else groups)
    return {"model": everstep.Union(model), "optimizer": everstep.Union(optimizer), "epoch": 0, **more}


def experts(seed: int) -> State:
    """A trunk that all ranks hold, and experts of which each holds its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    state = with_optimizer(Part(range(2), range(rank, EXPERTS, size), seed))
    state["model"].target.norm.running_mean.fill_(float(rank))  # a rank's own, as under DDP
    return state


def stages(seed: int) -> State:
    """A pipeline of as many stages as ranks; two replicas of each in a world of four."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = 2 if size == 4 else size
    return with_optimizer(Part(mine(LAYERS, rank % parts, parts), mine(EXPERTS, rank % parts, parts), seed))


def pipeline(seed: int) -> State:
    """A pipeline of as many stages as ranks. The last one's head is tied to the embedding where one rank has both."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model: Any = Part(mine(LAYERS, rank, size), (), seed)
    if rank == 0:
        model.embed = torch.nn.Embedding(9, 4)
        model.embed.weight.data = made(seed, "tied", model.embed.weight)
    if rank == size - 1:
        model.head = torch.nn.Linear(4, 9, bias=False)
        model.head.weight.data = made(seed, "tied", model.head.weight)
    if size == 1:
        model.head.weight = model.embed.weight
    return {"model": everstep.Union(model)}


def sharded(seed: int) -> State:
    """The trunk sharded over all ranks (FSDP2), an expert over the ranks of its group alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (groups, size // groups), mesh_dim_names=("group", "shard"))
    group = rank // (size // groups)
    model = Part(range(2), range(group, EXPERTS, groups), seed)
    for expert in model.experts.values():
        fully_shard(expert, mesh=mesh["shard"])
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    return with_optimizer(model)


def alike(seed: int) -> State:
    """All experts on every rank, each sharded over half of them: the halves hold the same, which no mesh tells."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2) if size % 2 == 0 else (1, size), mesh_dim_names=("a", "b"))
    model = Part(range(2), range(EXPERTS), seed)
    fully_shard(model, mesh=mesh["b"])
    return with_optimizer(model)


class Bag:
    """An object of a script."""

    def __init__(self, content: dict[Any, Any]) -> None:
        self.content = content

    def state_dict(self) -> dict[Any, Any]:
        return self.content

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert set(state) == set(self.content), (state, self.content)
        self.content = state


def plain(seed: int) -> State:
    """Mappings, an object, and a key that only some ranks have."""
    held = range(dist.get_rank(), 8, dist.get_world_size())
    bags = {f"part{i}": {"t": made(seed, f"t{i}", torch.empty(i)), "n": seed * i, "all": [1, (2, None)]} for i in held}
    numbers = {i: {"x": seed + i, "$odd": float("nan")} for i in held}
    state: State = {"bags": everstep.Union({**bags, "common": made(seed, "common", torch.empty(3))})}
    state["object"] = everstep.Union(Bag(numbers))
    state |= {f"only/{i}": everstep.Union(Part((i,), (), seed)) for i in held}
    return state


KINDS: dict[str, Callable[[int], State]] = {
    "experts": experts, "stages": stages, "pipeline": pipeline, "sharded": sharded, "alike": alike, "plain": plain
}  # fmt: skip


def step(state: State) -> None:
    if "optimizer" not in state:
        return
    for name, parameter in state["model"].target.named_parameters():
        parameter.grad = torch.full_like(parameter, float(zlib.crc32(name.encode()) % 97))
    state["optimizer"].target.step()
    state["epoch"] = 1


def told(state: State) -> dict[str, str]:
    """A digest of each value by a name that is the same on all ranks. Collective for what is sharded."""
    found: dict[str, str] = {}

    def feed(name: str, value: Any) -> None:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                feed(f"{name}/{key}", value[key])
        else:
            data = value.detach().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
            found[name] = hashlib.sha256(data).hexdigest()[:12]

    names: dict[int, str] = {}
    for key, target in state.items():
        held = target.target if isinstance(target, everstep.Union) else target
        if isinstance(held, torch.nn.Module):
            names |= {id(p): name for name, p in held.named_parameters()}
            feed(key, {n: t for n, t in held.state_dict().items() if "norm" not in n})
        elif isinstance(held, torch.optim.Optimizer):
            options = {names[id(p)]: (p, group["lr"]) for group in held.param_groups for p in group["params"]}
            for name, (p, lr) in sorted(options.items()):
                feed(f"{key}/{name}", {"lr": lr, **held.state[p]})
        else:
            feed(key, held.content if isinstance(held, Bag) else held)
    return found


def keep(root: str, kind: str) -> Result:
    state = KINDS[kind](1)
    with everstep.Checkpointer(root) as run:
        assert run.restore(state) is None
        step(state)
        for number in (1, 2, 3):
            outcome = type(run.save(number, state).wait(60)).__name__
    return {"told": told(state), "outcome": outcome}


def give(root: str, kind: str) -> Result:
    """The state is restored, saved from there, and read once more beside the run."""
    state, again = KINDS[kind](2), KINDS[kind](3)
    with everstep.Checkpointer(root) as run:
        at = run.restore(state)
        run.save(4, state).wait(60)
    dist.barrier()
    everstep.load(root, again)
    return {"told": told(state), "same": told(again) == told(state), "at": at}


# --- what is refused


def tensors(**held: float | torch.Tensor) -> everstep.Union:
    return everstep.Union({k: v if isinstance(v, torch.Tensor) else torch.full((3,), v) for k, v in held.items()})


def other_content(rank: int) -> State:
    return {"u": tensors(**{"both": float(rank), f"own{rank}": 1.0})}


def one_name(rank: int) -> State:
    """Two stages, each sharded over its own ranks, which call different things by one name."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))["shard"]
    return {"u": tensors(both=distribute_tensor(torch.full((4,), float(rank)), mesh, [Shard(0)]))}


def other_shape(rank: int) -> State:
    return {"u": tensors(both=torch.zeros(3 + rank))}


def other_value(rank: int) -> State:
    model = Part((0,), (rank,), 1)
    return {"m": everstep.Union(model), "o": everstep.Union(torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank)))}


def other_kind(rank: int) -> State:
    return {"u": tensors(a=1.0) if rank else everstep.Union(Bag({"a": torch.ones(3)}))}


def marked_once(rank: int) -> State:
    return {"u": tensors(a=1.0) if rank else {"a": torch.ones(3)}}


def cannot(rank: int) -> State:
    return {"u": everstep.Union({"a": object() if rank else 1})}


def nameless(rank: int) -> State:
    del rank
    return {"o": everstep.Union(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]))}


def torn(rank: int) -> State:
    """Half of a tensor: its other half is on no rank."""
    mesh = init_device_mesh("cpu", (2,))
    found = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    return {"u": everstep.Union({"t": found} if rank else {})}


REFUSED = (other_content, one_name, other_shape, other_value, other_kind, marked_once, cannot, nameless, torn)


def refuse(root: str) -> Result:
    """What each case told this rank, at the save of step 2 and again at that of step 3."""
    rank = dist.get_rank()
    found: Result = {}
    for case in REFUSED:
        run = everstep.Checkpointer(f"{root}/{case.__name__}", peer_timeout=60)
        base: State = {"u": tensors(**{f"own{rank}": 1.0})}
        run.restore(base)
        texts = []
        state = base | case(rank)
        for number in (1, 2):
            try:
                texts.append(type(run.save(number, state).wait(60)).__name__)
            except everstep.checkpoint.CheckpointError as e:
                texts.append(str(e))
            dist.barrier()
        found[case.__name__] = {"texts": texts, "latest": run.latest() is not None}
    late = everstep.Checkpointer(f"{root}/late")
    late.restore({"a": 1})
    try:
        late.save(1, {"a": 1, "u": tensors(a=1.0)})
    except everstep.checkpoint.StateMismatch as e:
        found["late"] = {"texts": [str(e)], "latest": late.latest() is not None}
    return found


def misfit(root: str) -> Result:
    """What ranks are told that ask together for more than a commit has, or for less."""
    rank = dist.get_rank()
    with everstep.Checkpointer(root) as run:
        state: State = {"u": tensors(**{f"own{rank}": 1.0, f"more{rank}": 2.0, "both": 3.0}), "gone": tensors(a=1.0)}
        run.restore(state)
        run.save(1, state).wait(60)
    dist.barrier()
    asks: dict[str, Callable[[], everstep.Union]] = {
        "more": lambda: tensors(
            **{f"own{rank}": 0.0, f"more{rank}": 0.0, "both": 0.0} | ({"new": 0.0} if rank else {})
        ),
        "less": lambda: tensors(**{f"own{rank}": 0.0, "both": 0.0} | ({"more0": 0.0} if rank else {})),
        "swapped": lambda: tensors(**{f"own{1 - rank}": 0.0, f"more{rank}": 0.0} | ({} if rank else {"both": 0.0})),
    }
    found: Result = {}
    for name, ask in asks.items():
        union = ask()
        try:
            everstep.Checkpointer(root).restore({"u": union})
            found[name] = "restored"
        except everstep.checkpoint.CheckpointError as e:
            found[name] = str(e)
        found[f"{name} values"] = sorted((k, v.tolist()) for k, v in union.target.items())
    return found


# --- what every rank holds the names of, on meshes of two dimensions


def meshed(seed: int, kind: str) -> State:
    """FSDP2 over a mesh: "hsdp" (replicas of shards), "fsdp_tp" (shards of tensor-parallel parts), "fsdp", "none"."""
    size = dist.get_world_size()
    rows = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 5), torch.nn.LayerNorm(5))
    if kind == "fsdp_tp":
        mesh = init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("shard", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        mesh = mesh["shard"]
    if kind != "none":
        mesh = init_device_mesh("cpu", (size,)) if kind == "fsdp" else mesh
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1 * seed), "epoch": seed}


def converted(root: str, kind: str) -> Result:
    new = not Path(root).exists()
    dist.barrier()
    state = meshed(1 if new else 2, kind)
    # A norm that tensor parallelism leaves alone is the same on several ranks, and its own mesh does not tell it.
    marks = new and kind == "fsdp_tp"
    given = {k: everstep.Union(v) if marks and k != "epoch" else v for k, v in state.items()}
    with everstep.Checkpointer(root) as run:
        at = run.restore(given)
        if new:
            for name, parameter in state["model"].named_parameters():
                parameter.grad = torch.full_like(parameter, float(zlib.crc32(name.encode()) % 97))
            state["optimizer"].step()
            run.save(1, given).wait(60)
    state["epoch"] = given["epoch"]
    return {"at": at, "digest": worlds.digest(state)}


worlds.SCENARIOS.update(keep=keep, give=give, refuse=refuse, misfit=misfit, converted=converted)

if __name__ == "__main__":
    print(json.dumps([worlds.world(Path(sys.argv[1]), n, spec) for n, spec in enumerate(sys.argv[2:])]))
