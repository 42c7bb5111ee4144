"""What a script has cut for its world besides what it trains on: loaders and samplers of an evaluation, say.

Where worlds change, a process builds its objects in a world of one. A loader that `run.loader` made, and a
`DistributedSampler` made without `num_replicas` and `rank`, mean the present world: they are cut anew with each. A
sampler that was told its place stays as it is, and is refused once it is iterated in a world that it was not made in.

Invariant: nothing of torch's is changed where worlds do not change, nor after `end`.
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

_make = DistributedSampler.__init__
_iterate = DistributedSampler.__iter__


class Resharded(Protocol):
    """What was made for a place in a world."""

    @property
    def world(self) -> World: ...

    def reshard(self, rank: int, world_size: int) -> None:
        """The world has changed."""
        ...


class Resharding:
    """One a run. `most`: where worlds change, the most processes that the job may have; look at the samplers that are
    made from now on. Before there is a world their length is that of a share of so many, which schedules are made by;
    iterated, they give all samples, as in a world of one."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self.shape = Shape()  # of the mesh, if the run has one
        self._loaders = weakref.WeakSet[Resharded]()
        self._samplers = weakref.WeakSet[DistributedSampler[Any]]()
        self._fixed = weakref.WeakKeyDictionary[DistributedSampler[Any], World | None]()  # made in which world
        self._world: World | None = None  # None: while the process builds its objects
        if most is not None:
            self._look()

    def add(self, loader: Resharded) -> None:
        """A loader that `run.loader` made, say."""
        self._loaders.add(loader)

    @property
    def made(self) -> bool:
        """Whether there is anything to cut."""
        return bool(self._loaders or self._samplers)

    def reshard(self, rank: int, world_size: int) -> World:
        """The world has changed; what this process has to read in it."""
        self._world = self.shape.reads_as(rank, world_size)
        for loader in list(self._loaders):
            if loader.world != self._world:
                loader.reshard(self._world.rank, self._world.size)
        for sampler in list(self._samplers):
            _cut(sampler, self._world.rank, self._world.size)
        return self._world

    def end(self) -> None:
        """There is no other world after this one."""
        DistributedSampler.__init__ = _make  # type: ignore[method-assign]
        DistributedSampler.__iter__ = _iterate  # type: ignore[method-assign]

    def _look(self) -> None:
        cuts = self

        def make(sampler: Any, *given: Any, **named: Any) -> None:
            _make(sampler, *given, **named)
            places = (*given[1:3], named.get("num_replicas"), named.get("rank"))
            if all(place is None for place in places):
                cuts._samplers.add(sampler)
                if cuts._world is None:
                    _cut(sampler, 0, cuts.shape.reads_as(0, cuts._most or 1).size)
            else:
                cuts._fixed[sampler] = cuts._world

        def iterate(sampler: Any) -> Iterator[Any]:
            cuts._check(sampler)
            if cuts._world is None and sampler in cuts._samplers:
                sampler = copy.copy(sampler)
                _cut(sampler, 0, 1)
            return _iterate(sampler)

        DistributedSampler.__init__ = make  # type: ignore[method-assign,assignment]
        DistributedSampler.__iter__ = iterate  # type: ignore[method-assign]

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
    """As if it had been made in that world."""
    epoch = sampler.epoch
    _make(sampler, sampler.dataset, size, rank, sampler.shuffle, sampler.seed, sampler.drop_last)
    sampler.epoch = epoch
