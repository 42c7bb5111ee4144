"""The mesh of a sharded job: replicas × shards, where the shards are those of FSDP2, of tensor parallelism or the
script's own. A script keeps the same `DeviceMesh`, and so do FSDP2 and all DTensors, while the members of its two
process groups change.

The shards of a replica are neighbours in rank: rank r holds shard r % shards, in replica r // shards. Before its first
round a process has no rank, so it builds its objects with a shard number that may change.

Invariant: after each `move` the coordinates, the ranks of both groups and the mesh's layout agree.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch

from everstep.recovery.announcements import AnnouncedRound
from everstep.recovery.errors import LoopError
from everstep.recovery.forming.forming import Subgroup
from everstep.recovery.group.recoverable import RecoverableGroup
from everstep.recovery.group.script_location import script_call_site
from everstep.recovery.sharding import tensor_parallel
from everstep.recovery.state.shape import MODEL, REPLICATE, SHARD, TENSOR
from everstep.torch_private import meshes
from everstep.torch_private.groups import set_ranks

# --- unmoved
# A mesh before its first round, when neither the number of replicas nor this process's replica is known. Torch's own
# mesh would answer for a world of one replica. So a script that asks is refused, as it is when it asks a group. Torch
# itself gets an answer, because it builds modules over the mesh. Invariant: after `end` the mesh is torch's own again.


def begin(mesh: Any, inside: RecoverableGroup, kind: str) -> None:
    """Refuse the script's questions to the mesh. `inside`: the group of a replica's ranks, in the dimension called
    `kind`."""
    mesh._everstep = (inside, kind)
    mesh.__class__ = _asking()


def end(mesh: Any) -> None:
    """Stop, because the mesh has its place in a round."""
    if isinstance(mesh, _asking()):
        del mesh._everstep
        mesh.__class__ = _device_mesh_class()


def _device_mesh_class() -> Any:
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415  few scripts shard

    return DeviceMesh


@cache
def _asking() -> Any:
    class Unmoved(_device_mesh_class()):  # type: ignore[misc]
        _everstep: tuple[RecoverableGroup, str]

        def _ask(self, what: str) -> None:
            inside, _ = self._everstep
            inside.ask_ranks(f"mesh.{what}")

        def _is_inside(self, mesh_dim: int | str | None) -> bool:
            """Whether the dimension, or the whole mesh, contains only ranks of one replica."""
            _, kind = self._everstep
            names = self.mesh_dim_names or ()
            if isinstance(mesh_dim, int) and -len(names) <= mesh_dim < len(names):
                return bool(names[mesh_dim] == kind)
            return mesh_dim == kind or (mesh_dim is None and names == (kind,))

        def _knows(self, mesh_dim: int | str | None) -> bool:
            """Whether this process's rank in the group is final."""
            inside, _ = self._everstep
            return inside.knows_place and self._is_inside(mesh_dim)

        def __repr__(self) -> str:
            # torch's own text would show one replica. Printing a mesh is no reason to refuse a script.
            _, kind = self._everstep
            sizes = zip(self.mesh_dim_names or (), meshes.sizes_of(self), strict=False)
            shown = ", ".join(f"{name}={size if name == kind else '?'}" for name, size in sizes)
            return f"DeviceMesh(({shown}), '{self.device_type}', its ranks are known from run.steps() on)"

        def size(self, mesh_dim: Any = None) -> Any:
            if not self._is_inside(mesh_dim):
                self._ask("size()")
            return super().size(mesh_dim)

        @property
        def shape(self) -> Any:
            if not self._is_inside(None):
                self._ask("shape")
            return super().shape

        @property
        def mesh(self) -> Any:
            self._ask("mesh")
            return super().mesh

        def get_local_rank(self, mesh_dim: Any = None) -> Any:
            if not self._knows(mesh_dim):
                self._ask("get_local_rank()")
            return super().get_local_rank(mesh_dim)

        def get_coordinate(self) -> Any:
            if not self._knows(None):
                self._ask("get_coordinate()")
            return super().get_coordinate()

    return Unmoved


# --- mesh

log = logging.getLogger("everstep.train")


class RecoverableMesh:
    """A script passes `device_mesh` to `fully_shard`, or takes its `["tensor"]`. `new_group` registers a group with
    c10d, which learns the ranks of `everyone` here: the checkpoint engine asks for them if state is sharded."""

    def __init__(
        self,
        shards: int,
        provisional: int,
        device: str,
        everyone: RecoverableGroup,
        new_group: Callable[[str], RecoverableGroup],
        kind: str = SHARD,
    ) -> None:
        from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415  few scripts shard

        self._everyone = everyone
        self.kind = kind
        self.shards = shards
        self.shard = provisional % shards
        self.replicate_group = new_group("mesh_replicate")
        self.shard_group = new_group(f"mesh_{kind}")
        for group in self.groups:
            group.on_begin = _refuse
        self.shard_group.knows_place = kind == MODEL
        # This process is rank 0 of a world of one; the other ranks of the mesh do not exist yet.
        others = iter(range(1, shards))
        row = [0 if i == self.shard else next(others) for i in range(shards)]
        self._set_ranks((0, 1), (self.shard, shards), {0: 0}, {rank: i for i, rank in enumerate(row)})
        groups: list[Any] = [self.replicate_group, self.shard_group]
        names = (REPLICATE, kind)
        self.device_mesh = cast("Any", DeviceMesh.from_group(groups, device, mesh=[row], mesh_dim_names=names))
        # The meshes of one dimension that the script and FSDP2 have sliced from this one.
        self._parts: list[weakref.ref[Any]] = []  # no set: they are equal to each other, and their hash changes
        self._moved = False
        meshes.on_slice(self.device_mesh, self._sliced)
        begin(self.device_mesh, self.shard_group, kind)
        # The mesh over which parameters are sharded. FSDP2 knows of the replicas; tensor parallelism does not.
        self.over: Any = self.device_mesh[TENSOR] if kind == TENSOR else self.device_mesh
        if kind == TENSOR:
            tensor_parallel.cut_alone(lambda group: group is self.shard_group and not self._moved)

    def _sliced(self, part: Any) -> None:
        self._parts.append(weakref.ref(part))
        if not self._moved:
            begin(part, self.shard_group, self.kind)

    @property
    def groups(self) -> tuple[RecoverableGroup, RecoverableGroup]:
        return self.replicate_group, self.shard_group

    @property
    def model_size(self) -> int:
        """How many ranks of a replica have plain tensors that differ in kind and number."""
        return self.shards if self.kind == MODEL else 1

    def fits(self, round_: AnnouncedRound) -> bool:
        """Whether the round's world consists of whole replicas. If not, the log says so."""
        if round_.world_size % self.shards == 0:
            return True
        log.warning(
            "round %d has %d ranks, no whole replicas of %d shards: waiting for the next. If the job is to go "
            "on with fewer, make its sizes multiples (spec.elastic.groupSize)",
            round_.number, round_.world_size, self.shards,
        )  # fmt: skip
        return False

    def misplaced(self, round_: AnnouncedRound) -> str:
        """Why this process cannot have its rank in the round; empty if it can. Only objects that a script has itself
        built for one place cannot be turned into those of another."""
        model_rank = round_.rank % self.shards
        if self.kind != MODEL or model_rank == self.shard:
            return ""
        return (
            f"round {round_.number} gives rank {round_.rank} to this process, place {model_rank} of a replica, and its "
            f"script has built what belongs to place {self.shard}"
        )

    def parts(self, rank: int, world_size: int) -> tuple[Subgroup, Subgroup]:
        """The groups of this rank in such a world, in the form of `groups`."""
        replica, shard = divmod(rank, self.shards)
        return (
            Subgroup(f"replicate-{shard}", replica, world_size // self.shards),
            Subgroup(f"shard-{replica}", shard, self.shards),
        )

    def move(self, rank: int, world_size: int) -> None:
        """Move to another rank, or to a world of another size. Values computed with the mesh stay valid: only the
        number of replicas changes, and the place of a process that has not trained."""
        self._moved = True
        replicas = world_size // self.shards
        replica, self.shard = divmod(rank, self.shards)
        row = {replica * self.shards + i: i for i in range(self.shards)}
        column = {i * self.shards + self.shard: i for i in range(replicas)}
        self._set_ranks((replica, replicas), (self.shard, self.shards), column, row)
        set_ranks(self._everyone, {i: i for i in range(world_size)})
        ranks = torch.arange(world_size, dtype=torch.int).view(replicas, self.shards)
        self._parts = [reference for reference in self._parts if reference() is not None]
        parts = [part for reference in self._parts if (part := reference()) is not None]
        for mesh in (self.device_mesh, *parts):
            end(mesh)
        meshes.relayout(self.device_mesh, ranks, rank)
        for part in parts:
            meshes.relayout(part, ranks[:, self.shard] if part.mesh_dim_names == (REPLICATE,) else ranks[replica], rank)

    def _set_ranks(
        self, replicate: tuple[int, int], shard: tuple[int, int], column: dict[int, int], row: dict[int, int]
    ) -> None:
        for group, (rank, size), ranks in (
            (self.replicate_group, replicate, column),
            (self.shard_group, shard, row),
        ):
            group.set_rank(rank, size)
            set_ranks(group, ranks)


def _refuse(name: str, _: Any) -> None:
    """Refuse a collective that begins before this process has met its peers."""
    site = script_call_site(sys._getframe(1))
    raise LoopError(
        f"{name}{site.at if site is not None else ''} over a group of run.mesh(): before the loop this process is "
        "alone, and nobody else is in it. DistributedDataParallel is for models that are not cut: write "
        "run.average_gradients(model) behind the last backward() of a step for one that is cut over "
        "run.mesh(tensor=N); fully_shard averages by itself. What else is to be reduced belongs inside `with step:`"
    )
