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
from typing import Any, cast

import torch

from everstep.recovery.announcements import AnnouncedRound
from everstep.recovery.errors import LoopError
from everstep.recovery.forming.forming import Subgroup
from everstep.recovery.group.recoverable import RecoverableGroup
from everstep.recovery.group.script_location import script_call_site
from everstep.recovery.sharding import tensor_parallel, unmoved
from everstep.recovery.state.shape import MODEL, REPLICATE, SHARD, TENSOR
from everstep.torch_private import meshes
from everstep.torch_private.groups import set_ranks

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
        self._place((0, 1), (self.shard, shards), {0: 0}, {rank: i for i, rank in enumerate(row)})
        groups: list[Any] = [self.replicate_group, self.shard_group]
        names = (REPLICATE, kind)
        self.device_mesh = cast("Any", DeviceMesh.from_group(groups, device, mesh=[row], mesh_dim_names=names))
        # The meshes of one dimension that the script and FSDP2 have sliced from this one.
        self._parts: list[weakref.ref[Any]] = []  # no set: they are equal to each other, and their hash changes
        self._moved = False
        meshes.on_slice(self.device_mesh, self._sliced)
        unmoved.begin(self.device_mesh, self.shard_group, kind)
        # The mesh over which parameters are sharded. FSDP2 knows of the replicas; tensor parallelism does not.
        self.over: Any = self.device_mesh[TENSOR] if kind == TENSOR else self.device_mesh
        if kind == TENSOR:
            tensor_parallel.cut_alone(lambda group: group is self.shard_group and not self._moved)

    def _sliced(self, part: Any) -> None:
        self._parts.append(weakref.ref(part))
        if not self._moved:
            unmoved.begin(part, self.shard_group, self.kind)

    @property
    def groups(self) -> tuple[RecoverableGroup, RecoverableGroup]:
        return self.replicate_group, self.shard_group

    @property
    def places(self) -> int:
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
        place = round_.rank % self.shards
        if self.kind != MODEL or place == self.shard:
            return ""
        return (
            f"round {round_.number} gives rank {round_.rank} to this process, place {place} of a replica, and its "
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
        self._place((replica, replicas), (self.shard, self.shards), column, row)
        set_ranks(self._everyone, {i: i for i in range(world_size)})
        ranks = torch.arange(world_size, dtype=torch.int).view(replicas, self.shards)
        self._parts = [reference for reference in self._parts if reference() is not None]
        parts = [part for reference in self._parts if (part := reference()) is not None]
        for mesh in (self.device_mesh, *parts):
            unmoved.end(mesh)
        meshes.relayout(self.device_mesh, ranks, rank)
        for part in parts:
            meshes.relayout(part, ranks[:, self.shard] if part.mesh_dim_names == (REPLICATE,) else ranks[replica], rank)

    def _place(
        self, replicate: tuple[int, int], shard: tuple[int, int], column: dict[int, int], row: dict[int, int]
    ) -> None:
        for group, (rank, size), ranks in (
            (self.replicate_group, replicate, column),
            (self.shard_group, shard, row),
        ):
            group.place(rank, size)
            set_ranks(group, ranks)


def _refuse(name: str, _: Any) -> None:
    """Refuse a collective that begins before this process has met its peers."""
    asked = script_call_site(sys._getframe(1))
    raise LoopError(
        f"{name}{asked.at if asked is not None else ''} over a group of run.mesh(): before steps() this process is "
        "alone, and nobody else is in it. DistributedDataParallel is for models that are not cut: write "
        "run.average_gradients(model) behind the last backward() of a step for one that is cut over "
        "run.mesh(tensor=N); fully_shard averages by itself. What else is to be reduced belongs inside `with step:`"
    )
