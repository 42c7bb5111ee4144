"""Divides the state of `ZeroRedundancyOptimizer` anew among the ranks of a new round.

Each parameter's state is on one rank of the world, which a `Partition` names. A new round has another partition. If its
members hold all parts of one version, they give them to each other. Otherwise a part is lost with its process, and all
load the newest commit. Invariants: parts that are put together are of one step and of one partition; after an error
each member has the part that it had before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from everstep.checkpoint.state.divided import NAME, DividedOptimizer, is_divided, undividable
from everstep.recovery.group.members import Members
from everstep.recovery.sharding.fsdp import NotRecoverable
from everstep.recovery.transfer import broadcast
from everstep.recovery.transfer.agreement import NoState
from everstep.torch_private.optimizers import divide

# A step that is repeated needs the parts of all ranks, and a lost peer has taken its own with it.
NO_UNDO: Final = f"{NAME} has a part of its state on each rank"


@dataclass(frozen=True, slots=True)
class Partition:
    """A rank's part of so many `parts`."""

    parts: int
    part: int


# The old state of each divided optimizer, by its key and by parameter.
OldStates = Mapping[str, Mapping[Any, Any]]


def check(state: Mapping[str, Any], *, meshed: bool) -> None:
    """Refuse an optimizer whose state cannot be divided anew in process. `meshed`: the run has a mesh. Raises
    `NotRecoverable`."""
    for key, target in state.items():
        if not is_divided(target):
            continue
        if why := undividable(key, target):
            raise NotRecoverable(why)
        if meshed:
            raise NotRecoverable(
                f"{key}: {NAME} divides its state among all ranks, and run.mesh() has replicas. Leave run.mesh() out; "
                "or, with mesh=run.mesh(shard=N), use fully_shard(), which divides the optimizer's state in a replica, "
                "and an undivided optimizer"
            )
        if target.process_group is not dist.group.WORLD:
            raise NotRecoverable(
                f"{key}: {NAME}(process_group=…) divides its state among a part of the ranks, which cannot change when "
                "a peer is lost. Leave process_group out; or, to keep a second copy of each part in another replica, "
                "use fully_shard() with mesh=run.mesh(shard=N) (examples/zero has stage 1 with it)"
            )


def sources(partitions: Sequence[Partition | None]) -> list[int]:
    """The rank that gives each part, of members that hold the newest state (None: another member). Raises `NoState`."""
    by_partition: dict[int, dict[int, int]] = {}
    for rank, partition in enumerate(partitions):
        if partition is not None:
            by_partition.setdefault(partition.parts, {}).setdefault(partition.part, rank)
    for parts, by_part in sorted(by_partition.items()):
        if len(by_part) == parts:
            return [by_part[part] for part in range(parts)]
    lost = [
        f"{', '.join(str(part) for part in range(parts) if part not in by_part)} of {parts}"
        for parts, by_part in sorted(by_partition.items())
    ]
    raise NoState(f"part {' and '.join(lost)} of the optimizer's state is lost with its process")


class DividedOptimizers:
    """The optimizers of a tracked state that divide theirs. All have the same partition. `spoiled`: memory holds parts
    of an interrupted restore."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._optimizers = {key: target for key, target in state.items() if is_divided(target)}
        self.spoiled = False

    def __bool__(self) -> bool:
        return bool(self._optimizers)

    @property
    def partition(self) -> Partition:
        for optimizer in self._optimizers.values():
            return Partition(optimizer.world_size, optimizer.rank)
        return Partition(1, 0)

    def others(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What of `state` is not divided."""
        return {key: target for key, target in state.items() if key not in self._optimizers} if self else state

    def spoil(self, new: Partition) -> None:
        """Take another part, which is to come from a commit. Until then nothing in memory is whole."""
        self.spoiled = bool(self._optimizers)
        self._divide(new)

    def _divide(self, new: Partition) -> None:
        for optimizer in self._optimizers.values():
            divide(optimizer, new.part, new.parts)

    @contextmanager
    def divided(self, new: Partition) -> Iterator[OldStates]:
        """Take another part, and yield the state of the old one. After an error the old part is taken back."""
        old = self.partition
        old_states = {key: dict(optimizer.optim.state) for key, optimizer in self._optimizers.items()}
        self._divide(new)
        try:
            yield old_states
        except BaseException:
            self._divide(old)
            for key, optimizer in self._optimizers.items():
                optimizer.optim.state.update(old_states[key])
            raise

    def exchange(self, old_states: OldStates, givers: Sequence[int], members: Members) -> None:
        """Fill the new part from the parts of `givers`, which hold `old_states`. Collective. Raises `PeerLost`."""
        for giver in givers:
            parts = {key: _Arriving(optimizer, old_states[key]) for key, optimizer in self._optimizers.items()}
            others = tuple(rank for rank in range(members.world_size) if rank != giver)
            broadcast.send(parts, giver, others, members)
            if giver == members.rank:
                for part in parts.values():
                    part.add(part.state_dict())


NONE_DIVIDED: Final = DividedOptimizers({})


class _Arriving(DividedOptimizer):
    """One of several parts that arrive one after the other."""

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        self.add(tree)
