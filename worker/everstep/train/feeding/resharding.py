"""Reshards other loaders and samplers of a script, for example those of an evaluation, when the world changes.

If worlds may change, a process builds its objects in a world of one. A loader from `run.loader`, and a
`DistributedSampler` made without `num_replicas` and `rank`, are meant for the present world: they are resharded with
each new one. A sampler with a given place stays as it is. It is refused when it is iterated in another world than that
in which it was made.

Invariant: torch is not changed if worlds do not change, and samplers do as torch's after `end`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DistributedSampler

from everstep.data.plan.assignment import World
from everstep.recovery.errors import LoopError
from everstep.recovery.state.shape import Shape
from everstep.torch_private.patches import Replacements, around

_make = DistributedSampler.__init__


class Resharded(Protocol):
    """An object that was made for a place in a world."""

    @property
    def world(self) -> World: ...

    def reshard(self, rank: int, world_size: int) -> None:
        """The world has changed."""


class Resharding:
    """The resharded objects of one run. `most`: if worlds may change, the largest number of processes; then samplers
    that are made from now on are tracked. Before the first world, their length is that of one of `most` shares, from
    which a script makes its schedules. When iterated, they give all samples, as in a world of one."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self.shape = Shape()  # of the mesh, if the run has one
        self._loaders = weakref.WeakSet[Resharded]()
        self._samplers = weakref.WeakSet[DistributedSampler[Any]]()
        self._fixed = weakref.WeakKeyDictionary[DistributedSampler[Any], World | None]()  # made in which world
        self._world: World | None = None  # None: while the process builds its objects
        self._replaced = Replacements()
        if most is not None:
            self._replaced.put("__init__", around(self._make), DistributedSampler)
            self._replaced.put("__iter__", around(self._iterate), DistributedSampler)

    def add(self, loader: Resharded) -> None:
        """Track an object, for example a loader from `run.loader`."""
        self._loaders.add(loader)

    @property
    def made(self) -> bool:
        """Whether there is anything to reshard."""
        return bool(self._loaders or self._samplers)

    def reshard(self, rank: int, world_size: int) -> World:
        """The world has changed; the argument is this process's share of the data in it."""
        self._world = self.shape.reads_as(rank, world_size)
        for loader in list(self._loaders):
            if loader.world != self._world:
                loader.reshard(self._world.rank, self._world.size)
        for sampler in list(self._samplers):
            _cut(sampler, self._world.rank, self._world.size)
        return self._world

    def end(self) -> None:
        """No further world follows."""
        self._replaced.end()

    def _make(self, make: Any, sampler: Any, *given: Any, **named: Any) -> None:
        make(sampler, *given, **named)
        arguments = (*given[1:3], named.get("num_replicas"), named.get("rank"))
        if all(argument is None for argument in arguments):
            self._samplers.add(sampler)
            if self._world is None:
                _cut(sampler, 0, self.shape.reads_as(0, self._most or 1).size)
        else:
            self._fixed[sampler] = self._world

    def _iterate(self, iterate: Any, sampler: Any) -> Iterator[Any]:
        self._check(sampler)
        if self._world is None and sampler in self._samplers:
            sampler = copy.copy(sampler)
            _cut(sampler, 0, 1)
        indices: Iterator[Any] = iterate(sampler)
        return indices

    def _check(self, sampler: DistributedSampler[Any]) -> None:
        made = self._fixed.get(sampler, self._world)
        if made == self._world or sampler.num_replicas == 1:
            return
        where = "before run.steps() began, when no process has a rank" if made is None else f"as rank {made.rank}"
        now = self._world
        assert now is not None
        raise LoopError(
            f"{type(sampler).__qualname__}(num_replicas={sampler.num_replicas}, rank={sampler.rank}) was made {where},"
            f" and is iterated by rank {now.rank} of {now.size}: leave out num_replicas= and rank=, and it follows the"
            " present world. What is trained on is passed to the session: run.steps(loader, …)"
        )


def _cut(sampler: DistributedSampler[Any], rank: int, size: int) -> None:
    """Change the sampler as if it had been made in that world."""
    epoch = sampler.epoch
    _make(sampler, sampler.dataset, size, rank, sampler.shuffle, sampler.seed, sampler.drop_last)
    sampler.epoch = epoch
