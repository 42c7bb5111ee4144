"""Worlds of real processes over gloo for the tests of this folder, run as a program.

    python worlds.py OUT SPEC...      SPEC is scenario:size:root[:key=value…]

One process imports torch and forks every rank of every world, as a launcher with a fork server does. Each rank leaves
its result in `OUT/<number of the spec>-<rank>.json`; the exit codes are printed, a list for each spec.
"""

import hashlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once, not once a rank: optimizers import it
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import everstep
import everstep.checkpoint
import everstep.checkpoint.format.chunks
from everstep.storage import ObjectStore, open_store
from support.checkpoint.states_held import own_part

torch.set_num_threads(1)
everstep.checkpoint.format.chunks.MIN_CHUNK_BYTES = 4096  # type: ignore[misc]  # so that small states have several chunks

State = dict[str, Any]
Result = dict[str, Any]


class Counting:
    """A store that counts the bytes of shards that are read through it; a far one does not say that it is files."""

    def __init__(self, inner: ObjectStore, far: str = "") -> None:
        self._inner = inner
        self.url = f"far+{inner.url}" if far else inner.url
        self.read = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_into(self, name: str, start: int, *buffers: memoryview) -> None:
        self.read += sum(len(buffer) for buffer in buffers) if name.startswith("data/") else 0
        self._inner.get_into(name, start, *buffers)


def network(seed: int) -> torch.nn.Module:
    """Some layers, with shapes that no world size divides and some that are shorter than a world."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(37, 90), torch.nn.LayerNorm(90), torch.nn.Linear(90, 101), torch.nn.Linear(101, 5, bias=False),
        torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3),
    )  # fmt: skip


def state(kind: str, seed: int, **options: Any) -> State:
    """Model and optimizer, replicated ("ddp") or sharded ("fsdp"; "tensor3": replicas of three shards each, by tensor
    parallelism)."""
    model: torch.nn.Module = network(seed)
    if kind.startswith("tensor"):
        shards = int(kind.removeprefix("tensor"))
        mesh = init_device_mesh(
            "cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "tensor")
        )
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(output_layouts=Replicate()),
                                                   "2": RowwiseParallel(input_layouts=Replicate())})  # fmt: skip
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:  # type: ignore[attr-defined]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.01), "epoch": 0, **options}


def train(found: State, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(1000 + step)
        batch = torch.randn(4, 37)
        found["optimizer"].zero_grad()
        found["model"](batch).square().sum().backward()
        found["optimizer"].step()
    found["epoch"] = steps


def digest(found: State) -> str:
    """Of the logical state: every sharded tensor is gathered. Collective."""
    h = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            h.update(f"{value.dtype}{tuple(value.shape)}".encode())
            h.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                h.update(repr(key).encode())
                feed(value[key])
        elif isinstance(value, list | tuple):
            for v in value:
                feed(v)
        else:
            h.update(repr(value).encode())

    bare: Any = getattr(found["model"], "module", found["model"])
    for part in (bare.state_dict(), found["optimizer"].state_dict(), found["epoch"]):
        feed(part)
    return h.hexdigest()


def save(root: str, kind: str) -> Result:
    found = state(kind, 1)
    with everstep.Checkpointer(root) as checkpointer:
        assert checkpointer.restore(found) is None
        train(found, 3)
        checkpointer.save(3, found).wait(60)
    return {"digest": digest(found)}


def permuted(root: str, kind: str) -> Result:
    """Load into optimizers that have the parameters in another order, without state of their own and with it."""

    def moments(found: State) -> dict[str, list[float]]:
        named = {p: name for name, p in found["model"].named_parameters()}
        whole = {named[p]: s["exp_avg"] for p, s in found["optimizer"].state.items()}
        full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in whole.items()}
        return {name: tensor.flatten().tolist() for name, tensor in sorted(full.items())}

    found = state(kind, 1)
    train(found, 3)
    with everstep.Checkpointer(root) as checkpointer:
        checkpointer.restore({})
        checkpointer.save(3, found).wait(60)
    dist.barrier()
    same = []
    for steps in (0, 1):
        other = state(kind, 2)
        other["optimizer"] = torch.optim.Adam(list(other["model"].parameters())[::-1], lr=0.01)
        train(other, steps)
        everstep.load(root, other)
        same.append(moments(other) == moments(found))
    return {"same": same}


def load(root: str, kind: str, far: str = "") -> Result:
    found = state(kind, 2)
    store = Counting(open_store(root), far)
    step = everstep.Checkpointer(store=store).restore(found)
    return {"step": step, "digest": digest(found), "read": store.read}


def look(root: str, kind: str) -> Result:
    """Read beside whoever has the log."""
    found = state(kind, 2)
    loaded = everstep.load(root, found)
    return {"step": loaded.step, "digest": digest(found)}


OWN: dict[str, Callable[[], Any]] = {
    "value": lambda: {"best": float(dist.get_rank())},
    "generator": lambda: torch.Generator().manual_seed(dist.get_rank()).get_state(),
    "weights": lambda: _ranked(torch.nn.Linear(3, 3)),
    "expert": lambda: {f"expert {dist.get_rank()}": torch.ones(3)},
    "missing": lambda: None,
}


def _ranked(module: torch.nn.Module) -> torch.nn.Module:
    torch.nn.init.constant_(module.weight, float(dist.get_rank()))  # type: ignore[arg-type]
    return module


def differ(root: str, what: str) -> Result:
    """A state of which each rank holds something else."""
    found: State = {"model": network(1), "epoch": 3, "rng": everstep.RngState()}
    checkpointer = everstep.Checkpointer(root)
    checkpointer.restore(found)
    own = {**found, "mine/own": OWN[what]()}
    if what == "missing" and dist.get_rank() == 0:
        own.pop("mine/own")
    result: Result = {}
    outcomes = []
    for step in (1, 2, 3):
        state = found if step == 1 else own
        try:
            outcomes.append(type(checkpointer.save(step, state).wait(60)).__name__)
        except everstep.checkpoint.CheckpointError as e:
            outcomes.append(type(e).__name__)
            result["text"] = str(e)
        dist.barrier()
    checkpointer.wait(60)
    dist.barrier()
    latest = checkpointer.latest()
    return {"outcomes": outcomes, "latest": latest.step if latest else None, **result}


def drift(root: str, what: str) -> Result:
    """Equal ranks save two steps. Then one rank's parameters, its moments or its learning rate become others."""
    module = network(1)
    optimizer = torch.optim.Adam(module.parameters())
    state: State = {"model": module, "optimizer": optimizer}
    checkpointer = everstep.Checkpointer(root, keep=9)
    checkpointer.restore(state)
    texts: list[str] = []
    for step in (1, 2, 3, 4):
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        with torch.no_grad():
            for p in module.parameters() if step == 3 and dist.get_rank() else ():
                moved = {"parameters": p, "moments": optimizer.state[p]["exp_avg_sq"]}.get(what)
                if moved is not None:
                    moved.mul_(1.5)
        if what == "rate" and step == 3 and dist.get_rank():
            optimizer.param_groups[0]["lr"] = 0.5
        try:
            checkpointer.save(step, state).wait(60)
        except everstep.checkpoint.StateMismatch as e:
            texts.append(str(e))
        dist.barrier()
    return {"texts": texts, "steps": [found.step for found in checkpointer.list()]}


def skip(root: str, who: str) -> Result:
    """One rank leaves out the save of step 3 and goes on: its third save is of another step than the others'."""
    checkpointer = everstep.Checkpointer(root, keep=9, peer_timeout=60)
    checkpointer.restore(small(0))
    for step in (1, 2):
        checkpointer.save(step, small(step)).wait(60)
        dist.barrier()
    texts = []
    for step in (3, 4, 5):
        if step == 3 and dist.get_rank() == int(who):
            continue
        try:
            checkpointer.save(step, small(step)).wait(60)
        except everstep.checkpoint.StateMismatch as e:
            texts.append(str(e))
    dist.barrier()
    return {"texts": texts, "steps": [found.step for found in checkpointer.list()]}


def thin(root: str) -> Result:
    """Sharded tensors with one row or one column, and without elements; a model whose last layer has one output."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def made(seed: int) -> State:
        torch.manual_seed(seed)
        layers = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 1))
        model = parallelize_module(layers, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * seed
        optimizer.step()
        row, one = torch.arange(seed, seed + 6.0).view(1, 6), torch.full((1, 1), float(seed))
        placed = {f"{t.shape} {p}": distribute_tensor(t.clone(), mesh, [p]) for t in (row, row.T.contiguous(), one)
                  for p in (Shard(0), Shard(1), Replicate())}  # fmt: skip
        empty = {f"{shape} {p}": distribute_tensor(torch.zeros(shape), mesh, [p]) for shape in ((0, 3), (3, 0))
                 for p in (Shard(0), Shard(1))}  # fmt: skip
        return {"model": model, "optimizer": optimizer, "epoch": 1, "placed": placed, "empty": empty}

    saved, loaded = made(1), made(2)
    with everstep.Checkpointer(root) as checkpointer:
        checkpointer.restore(saved)
        checkpointer.save(3, saved).wait(60)
    dist.barrier()
    everstep.load(root, loaded)
    same = [torch.equal(a.full_tensor(), loaded["placed"][name].full_tensor()) for name, a in saved["placed"].items()]
    alike = [a.shape == loaded["empty"][name].shape for name, a in saved["empty"].items()]
    return {"same": all(same) and all(alike) and digest(saved) == digest(loaded)}


def left_out(root: str) -> Result:
    """Rank 0 restores, and the others come later."""
    import everstep.checkpoint.ranks as ranks  # noqa: PLC0415

    ranks.PATIENCE = 0.4
    told: list[str] = []
    ranks.log.warning = lambda text, *values: told.append(text % values)  # type: ignore[method-assign]
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() != 0:
        store.wait(["told"])
    checkpointer = everstep.Checkpointer(root)
    if dist.get_rank() == 0:
        threading.Thread(target=_when, args=(lambda: bool(told), lambda: store.set("told", "yes"))).start()
    checkpointer.restore({"t": torch.zeros(1)})
    return {"told": told[:1]}


def _when(holds: Callable[[], bool], call: Callable[[], object]) -> None:
    while not holds():
        time.sleep(0.05)
    call()


def hurried(root: str) -> Result:
    """Saves that come faster than the store takes them."""

    class Slow(type(open_store(root))):  # type: ignore[misc]
        def put(self, name: str, data: Any) -> None:
            time.sleep(0.1 * (1 + dist.get_rank()))
            super().put(name, data)

        def start_upload(self, name: str, size_hint: int | None = None) -> Any:
            time.sleep(0.1 * (2 - dist.get_rank()))
            return super().start_upload(name, size_hint)

    state = {"t": torch.zeros(10)}
    with everstep.Checkpointer(store=Slow(root), keep=50, peer_timeout=60) as checkpointer:
        checkpointer.restore(state)
        for step in range(1, 9):
            state["t"].fill_(float(step))
            checkpointer.save(step, state)
            time.sleep(0.03)
    dist.barrier()
    return {"steps": [found.step for found in everstep.Checkpointer(root).list()]}


def load_and_train(root: str, kind: str) -> Result:
    """A state that is restored trains on as the one that was saved would have."""
    found = state(kind, 1)
    train(found, 3)
    want = digest(found)
    torch.manual_seed(7)
    restored = state(kind, 2)
    everstep.Checkpointer(root).restore(restored)
    assert digest(restored) == want
    for each in (found, restored):
        train(each, 2)
    return {"same": digest(found) == digest(restored)}


PLACEMENTS: dict[str, list[Any]] = {
    "rows": [Replicate(), Shard(0)], "columns": [Shard(1), Replicate()], "grid": [Shard(0), Shard(1)],
    "twice": [Shard(0), Shard(0)], "all": [Replicate(), Replicate()],
}  # fmt: skip


def tensors(seed: int, mesh: Any, shapes: str = "") -> dict[str, torch.Tensor]:
    """DTensors of every placement on a two-dimensional mesh, and a plain tensor."""
    torch.manual_seed(seed)
    found: dict[str, torch.Tensor] = {"plain": torch.randn(50, 3), "scalar": torch.tensor(float(seed))}
    for name, placements in PLACEMENTS.items():
        for dtype in (torch.float32, torch.bfloat16):
            found[f"{name}-{dtype}"] = distribute_tensor(torch.randn(13, 11, 3).to(dtype), mesh, placements)
    return found


def grid(root: str, rows: str, columns: str, seed: str = "1") -> Result:
    """Save (seed 1) or load (another) DTensors on a mesh of rows × columns."""
    mesh = init_device_mesh("cpu", (int(rows), int(columns)))
    found: State = {"tensors": tensors(int(seed), mesh)}
    checkpointer = everstep.Checkpointer(root)
    step = checkpointer.restore(found)
    if step is None:
        checkpointer.save(1, found).wait(60)
    checkpointer.close()
    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found["tensors"].items()}
    local = all(isinstance(v, DTensor) for k, v in found["tensors"].items() if k not in ("plain", "scalar"))
    h = hashlib.sha256()
    for name in sorted(full):
        h.update(name.encode() + full[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return {"step": step, "digest": h.hexdigest(), "sharded": local}


def uneven(root: str, rows: str, columns: str) -> Result:
    """Save, or load where there is a commit, what FSDP over tensor parallelism holds of axes that do not divide."""

    def made(first: float) -> torch.nn.Module:
        model = torch.nn.ModuleDict({str(n): torch.nn.Linear(2, n) for n in (1, 4, 7, 9, 13)})
        for p in model.parameters():
            p.data.copy_(torch.arange(first, first + p.numel()).view(p.shape))
        parallelize_module(model, mesh["tensor"], {"*": ColwiseParallel()})
        for layer in model.values():
            fully_shard(layer, mesh=mesh["rows"])
        return model

    mesh = init_device_mesh("cpu", (int(rows), int(columns)), mesh_dim_names=("rows", "tensor"))
    saved = made(1.0)
    run = everstep.Checkpointer(root)
    found = {"model": made(500.0)}
    if (step := run.restore(found)) is None:
        run.save(1, {"model": saved}).wait(60)
        everstep.load(root, found)
    run.close()
    pairs = zip(found["model"].parameters(), saved.parameters(), strict=True)
    return {"step": step, "same": all(torch.equal(own_part(a), own_part(b)) for a, b in pairs)}


def small(step: int) -> dict[str, Any]:
    """A replicated state of several tensors that says which step it is of."""
    return {"t": {f"t{i}": torch.full((40 + i, 50), float(step)) for i in range(6)}, "step": step}


def steps(root: str, last: str) -> Result:
    """Save steps 1 to `last`, the ranks in step."""
    with everstep.Checkpointer(root) as checkpointer:
        assert checkpointer.restore(small(0)) is None
        for step in range(1, int(last) + 1):
            checkpointer.save(step, small(step)).wait(60)
            dist.barrier()
    return {}


def restore(root: str, odd: str = "") -> Result:
    """What a world restores, and what it was told. With `odd`, rank 1 asks for less than the others, or for more."""
    events: list[str] = []

    def hook(kind: str, **fields: Any) -> None:
        events.extend([fields["error"]] if kind == "stepped-over" else [])

    into = small(0)
    if dist.get_rank() == 1 and odd == "less":
        del into["t"]
    if dist.get_rank() == 1 and odd == "more":
        into["unknown"] = 1
    store = Counting(open_store(root))
    try:
        step = everstep.Checkpointer(store=store, on_event=hook).restore(into)
    except everstep.checkpoint.CheckpointError as e:
        return {"error": str(e)}
    values = {float(v) for t in into.get("t", {}).values() for v in t.flatten()}
    return {"step": step, "values": sorted(values), "told": events, "read": store.read, "epoch": into["step"]}


def apart(root: str, at: str) -> Result:
    """A folder that each rank has of its own; `at`: the number of ranks that rank 0 shares its with."""
    own = root if dist.get_rank() < int(at) else f"{root}-{dist.get_rank()}"
    started = time.monotonic()
    try:
        everstep.Checkpointer(own).restore(small(0))
    except everstep.StoreUnusable as e:
        return {"error": str(e), "seconds": time.monotonic() - started}
    return {}


def diverge(root: str) -> Result:
    """A parameter's part that the last rank writes is not finite."""
    model = network(1)
    checkpointer = everstep.Checkpointer(root)
    checkpointer.restore({"model": model})
    checkpointer.save(1, {"model": model}).wait(60)
    dist.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[-1] = torch.nan
    try:
        checkpointer.save(2, {"model": model}).wait(60)
    except everstep.checkpoint.CheckpointError as e:
        return {"error": str(e)}
    return {"error": None}


def mutate(root: str) -> Result:
    """Parameters change while they are written; what is committed is what they were when `save` returned."""
    found = state("fsdp", 1)
    checkpointer = everstep.Checkpointer(root)
    checkpointer.restore(found)
    train(found, 2)
    want = digest(found)
    handle = checkpointer.save(2, found)
    while not handle.done():
        for parameter in found["model"].parameters():
            with torch.no_grad():
                parameter.to_local().add_(1.0)
    handle.wait(60)
    changed = digest(found)
    dist.barrier()
    checkpointer.close()
    again = state("fsdp", 3)
    everstep.Checkpointer(root).restore(again)
    return {"same": digest(again) == want, "changed": changed != want}


SCENARIOS: dict[str, Callable[..., Result]] = {
    "save": save, "load": load, "look": look, "differ": differ, "drift": drift, "skip": skip, "thin": thin,
    "hurried": hurried,
    "left_out": left_out, "load_and_train": load_and_train, "grid": grid, "steps": steps, "restore": restore,
    "diverge": diverge, "mutate": mutate, "apart": apart, "permuted": permuted, "uneven": uneven,
}  # fmt: skip


def rank_main(out: Path, number: int, spec: str, rank: int) -> None:
    scenario, size, root, *pairs = spec.split(":")
    options = dict(pair.split("=") for pair in pairs)
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/meeting-{number}", rank=rank, world_size=int(size),
        timeout=timedelta(seconds=90),
    )  # fmt: skip
    result = SCENARIOS[scenario](root, **options)
    (out / f"{number}-{rank}.json").write_text(json.dumps(result))
    dist.barrier()  # nobody leaves while another still talks to it


def world(out: Path, number: int, spec: str) -> list[int]:
    children = []
    for rank in range(int(spec.split(":")[1])):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rank_main(out, number, spec, rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    print(json.dumps([world(Path(sys.argv[1]), n, spec) for n, spec in enumerate(sys.argv[2:])]))
