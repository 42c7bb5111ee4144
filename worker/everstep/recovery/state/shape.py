"""The arrangement of a run's processes: replicas, each of so many shards, and which processes read the same data.
Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from everstep.data.plan.assignment import World
from everstep.recovery.errors import LoopError

REPLICATE: Final = "replicate"
# The name of the mesh's other dimension: state is sharded by FSDP2, by tensor parallelism, or by the script itself.
SHARD: Final = "shard"
TENSOR: Final = "tensor"
MODEL: Final = "model"


@dataclass(frozen=True, slots=True)
class Shape:
    """The arrangement that a script has asked for: its state in so many `shards`. `kind` says what makes the shards."""

    kind: str = SHARD
    shards: int = 1

    @property
    def readers(self) -> int:
        """How many neighbours in rank read the same data: unless FSDP2 makes the shards, they compute one replica
        together."""
        return self.shards if self.kind != SHARD else 1

    @property
    def model_size(self) -> int:
        """How many ranks of a replica hold different parameters in plain tensors, which do not show it."""
        return self.shards if self.kind == MODEL else 1

    def reads_as(self, rank: int, world_size: int) -> World:
        """Which part of the data a process has to read. A process that is alone before its first round reads all of
        it."""
        return World(rank // self.readers, max(1, world_size // self.readers))

    def of_sizes(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """Into how many parts the data may be divided, for these sizes of worlds."""
        return tuple(size // self.readers for size in sizes if size % self.readers == 0)

    def __str__(self) -> str:
        return f"mesh({self.kind}={self.shards})"


def shape_of(shard: int | None, tensor: int | None, model: int | None) -> Shape:
    """The shape for the arguments of a script's `mesh(…)`. Raises `LoopError`."""
    given = {name: n for name, n in ((SHARD, shard), (TENSOR, tensor), (MODEL, model)) if n is not None}
    if len(given) > 1:
        raise LoopError(
            f"mesh({', '.join(f'{name}={n}' for name, n in given.items())}): a replica is cut by FSDP2, by tensor "
            "parallelism or by the script itself, and by one of them only: pass one. Several in one run cannot go on "
            "when a peer is lost; under torchrun, with init_device_mesh, such a run starts again from its last commit"
        )
    if not given:
        raise LoopError(
            "mesh(): write run.mesh(shard=N) for FSDP2, run.mesh(tensor=N) for parallelize_module(), or "
            "run.mesh(model=N) for a model that the script itself divides over N ranks"
        )
    ((kind, shards),) = given.items()
    shape = Shape(kind, shards)
    if shape.shards < 1:
        raise LoopError(f"{shape}: the number of shards, 1 or more, is expected")
    return shape
