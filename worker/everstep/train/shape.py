"""How a run's processes are arranged: replicas, each of so many shards, and which of them read the same data. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from everstep.data.assignment import World
from everstep.train.step import LoopError

REPLICATE: Final = "replicate"
# What the mesh's other dimension is called: state is cut by FSDP2, or by tensor parallelism.
SHARD: Final = "shard"
TENSOR: Final = "tensor"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a script has asked for: its state in so many `shards`, which FSDP2 or tensor parallelism cuts (`kind`)."""

    kind: str = SHARD
    shards: int = 1

    @property
    def readers(self) -> int:
        """Neighbours in rank that read the same data: with tensor parallelism they compute one replica together."""
        return self.shards if self.kind == TENSOR else 1

    def reads_as(self, rank: int, world_size: int) -> World:
        """What a process has to read of the data: a process that is alone before its first round all of it."""
        return World(rank // self.readers, max(1, world_size // self.readers))

    def of_sizes(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """How many parts the data may be cut into, for these sizes of worlds."""
        return tuple(size // self.readers for size in sizes if size % self.readers == 0)

    def __str__(self) -> str:
        return f"mesh({self.kind}={self.shards})"


def asked(shard: int | None, tensor: int | None) -> Shape:
    """The shape that a script means. Raises `LoopError`."""
    if shard is not None and tensor is not None:
        raise LoopError(
            f"mesh(shard={shard}, tensor={tensor}): a replica is cut by FSDP2 or by tensor parallelism, and not both:"
            " pass one of them. Both in one run, and pipeline parallelism, cannot go on when a peer is lost; under "
            "torchrun, with init_device_mesh, such a run starts again from its last commit"
        )
    if shard is None and tensor is None:
        raise LoopError("mesh(): write run.mesh(shard=N) for FSDP2, or run.mesh(tensor=N) for tensor parallelism")
    found = Shape(SHARD, shard) if shard is not None else Shape(TENSOR, tensor or 0)
    if found.shards < 1:
        raise LoopError(f"{found}: the number of shards, 1 or more, is expected")
    return found
