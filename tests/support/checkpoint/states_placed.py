"""States with tensors that are cut over processes (DTensor), of every placement, in worlds of one and of two.

    python states_placed.py OUT SPEC...      SPEC is scenario:size:root[:key=value…]

In `check` rank 0 draws descriptions and sends them to the others; each builds its part of the states. `worlds.py` runs
the ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import Phase, given, seed
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import everstep
from everstep.checkpoint import StateMismatch
from everstep.checkpoint.state.tree import DTYPES
from everstep.storage import MemoryStore, open_store
from support.checkpoint import states, worlds
from support.checkpoint.states_checked import check, committed, times
from support.checkpoint.states_held import whole

MESHES = ("line", "column", "row")
WAYS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(2))
ALONE = 6  # states of a world of several that are saved alone
_made: dict[str, DeviceMesh] = {}


def mesh_of(name: str) -> DeviceMesh:
    """All processes in a line, or in a grid whose other dimension has a length of one."""
    if name not in _made:
        size = dist.get_world_size()
        shape = {"line": (size,), "column": (size, 1), "row": (1, size)}[name]
        _made[name] = init_device_mesh("cpu", shape)
    return _made[name]


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor that is cut over the processes. Those of the same dtype, shape, seed and cut are one, if `shared`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int
    shared: bool
    mesh: str
    ways: tuple[int, int]
    form: str
    wrap: str

    def build(self, into: states.Building) -> Any:
        name = ("placed", self.dtype, self.shape, self.seed, self.mesh, self.ways)
        base = into.bases.get(name) if self.shared else None
        if base is None:
            full = states.bits(self.dtype, self.shape, None if into.blank else self.seed)
            mesh = mesh_of(self.mesh)
            base = distribute_tensor(full, mesh, self._placements(mesh.ndim, into.moved), src_data_rank=None)
            if self.shared:
                into.bases[name] = base
        found = FORMS[self.form](base)
        return torch.nn.Parameter(found) if self.wrap == "parameter" and self.dtype in states.FLOATS else found

    def _placements(self, dims: int, moved: bool) -> list[Placement]:
        """One for each dimension of the mesh: those that the tensor has an axis for."""
        ways = [(way + moved) % (len(self.shape) + 1) for way in self.ways[:dims]]
        return [WAYS[way] for way in ways]


def of_part(like: DTensor, part: torch.Tensor) -> DTensor:
    """Another tensor that is cut as `like` is, of this part."""
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def gapped(tensor: DTensor) -> DTensor:
    """The same values, with memory between them that is not the tensor's."""
    part = tensor.to_local()
    wide = torch.zeros((*part.shape, 2), dtype=part.dtype)
    wide[..., 0] = part
    return of_part(tensor, wide[..., 0])


FORMS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda t: t,
    "again": lambda t: of_part(t, t.to_local()),  # another object of the same memory
    "gapped": gapped,
    "turned": lambda t: t.t() if t.dim() == 2 else t,
    "conj": lambda t: t.conj() if t.is_complex() else t,
}

placed = st.builds(
    Placed, st.sampled_from(list(DTYPES)) | st.just(torch.float32), states.sizes, states.seeds, st.booleans(),
    st.sampled_from(MESHES), st.tuples(st.integers(0, 3), st.integers(0, 3)), st.sampled_from(list(FORMS)),
    st.sampled_from(["tensor", "parameter"]),
)  # fmt: skip
ties = st.builds(  # few of them, so that a state often has several in the same memory
    Placed, st.sampled_from([torch.float32, torch.complex64]), st.just((3, 2)), st.just(1), st.just(True),
    st.sampled_from(MESHES), st.tuples(st.integers(0, 2), st.just(0)), st.sampled_from(list(FORMS)),
    st.sampled_from(["tensor", "parameter"]),
)  # fmt: skip
placed_states = states.states_of(placed | ties | states.leaves)


def run(root: str, examples: str, first: str = "0", together: str = "50") -> worlds.Result:
    """As many states as `examples` says, or fewer if there are no more; how many there were.

    In a world of several `together` states are saved and loaded as one: ranks that wait for each other cost more than
    all else. The last few come alone: of a small state a rank may hold nothing. With `together=1` what fails is a
    single state.
    """
    drawn: list[dict[str, states.Object]] = []

    def draws(take: Callable[[dict[str, states.Object]], None], *phases: Phase) -> None:
        @seed(int(first))
        @given(placed_states)
        @times(int(examples), *phases)
        def one(described: dict[str, states.Object]) -> None:
            drawn.append(described)
            take(described)

        one()

    if dist.get_world_size() == 1:  # then Hypothesis says the shortest that fails
        draws(lambda described: check(described, MemoryStore()))
        return {"states": len(drawn)}
    if dist.get_rank() == 0:
        draws(lambda described: None, Phase.generate)
    drawn = told([drawn])
    begin = 0
    while begin < len(drawn):
        left = len(drawn) - begin
        some = drawn[begin : begin + min(int(together), max(1, left - ALONE))]
        joined = {f"{n}.{key}": target for n, state in enumerate(some) for key, target in state.items()}
        try:
            check(joined, open_store(f"{root}/{begin}"))
        except BaseException:
            print(f"rank {dist.get_rank()}, states from {begin} on: {joined}", file=sys.stderr)
            raise
        begin += len(some)
    return {"states": len(drawn)}


def cut(tensor: torch.Tensor, way: Placement) -> DTensor:
    """Each process has this as its part."""
    return DTensor.from_local(tensor, mesh_of("line"), [way], run_check=False)


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


ODD: dict[str, Callable[[], Any]] = {
    "sum": lambda: cut(torch.ones(3), Partial()), "empty sum": lambda: cut(torch.ones(0), Partial()),
    "parameter": lambda: torch.nn.Parameter(cut(torch.ones(3), Partial("max"))),
    "type": lambda: cut(torch.ones(3, dtype=torch.complex128), Shard(0)), "freed": lambda: cut(freed(), Shard(0)),
    "twice": lambda: cut(torch.ones(3).expand(2, 3), Shard(0)),
}  # fmt: skip


def refused(root: str, kind: str, place: str) -> worlds.Result:
    """What is said of a state with a value that no commit holds, and what was written by then."""
    value: Any = ODD[kind]()
    if place == "nested":
        value = {"x": [value]}
    elif place == "module":
        value = states.module_of({"x": value})
    store = open_store(root)
    checkpointer = everstep.Checkpointer(store=store, on_event=lambda *_, **__: None)
    texts = []
    for call in (checkpointer.restore, partial(checkpointer.save, 1)):
        try:
            call({"odd": value, "even": torch.ones(3)})
        except StateMismatch as e:
            texts.append(str(e))
    checkpointer.close()
    dist.barrier()
    return {"texts": texts, "written": [str(p) for p in Path(root).rglob("data/*")]}


def untied(root: str, into: str) -> worlds.Result:
    """Weights that were tied when they were saved, into such that are not, and are cut in two ways or one of them."""
    full = torch.arange(12.0).view(4, 3)
    committed({"t": {"a": full, "b": full}}, open_store(root))
    blank = torch.zeros(4, 3)
    ways = {"cut": Shard(0), "across": Shard(1), "copies": Replicate()}
    a, b = (
        blank.clone()
        if kind == "plain"
        else distribute_tensor(blank, mesh_of("line"), [ways[kind]], src_data_rank=None)
        for kind in into.split("+")
    )
    state = {"t": {"a": a, "b": b}}
    told: worlds.Result = {}
    try:
        everstep.load(store=open_store(root), state=state)
    except StateMismatch as e:
        told = {"error": str(e), "changed": not all(_equal(t, blank) for t in (a, b))}
        for other in ("t/b", "t/a"):
            everstep.load(store=open_store(root), state=state, exclude=[other])
    return {**told, "same": [state["t"]["a"] is a, state["t"]["b"] is b, _equal(a, full), _equal(b, full)]}


def _equal(tensor: torch.Tensor, full: torch.Tensor) -> bool:
    return torch.equal(whole(tensor), full)


def told(what: list[Any]) -> Any:
    """What rank 0 says, on every rank."""
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(what, 0)
    return what[0]


worlds.SCENARIOS |= {"check": run, "refused": refused, "untied": untied}

if __name__ == "__main__":
    print(json.dumps([worlds.world(Path(sys.argv[1]), n, spec) for n, spec in enumerate(sys.argv[2:])]))
