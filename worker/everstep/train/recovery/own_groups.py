"""The process groups that the program uses: the default one, and those of all ranks that the script makes itself with
`dist.new_group()`, for DDP or for figures of its own.

Each is made anew in each round, behind a handle that the script keeps. Invariants: such a group has the members of the
present round, or none of its collectives succeeds; groups of only some ranks are refused by name (`doors`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

from everstep.train.recovery import doors, early, forming
from everstep.train.recovery.flight import Waiting
from everstep.train.recovery.group import BACKEND, RecoverableGroup
from everstep.train.recovery.scope import At, Scope, script_asks
from everstep.train.step import LoopError

MOST = 16  # each has connections of its own in each round


class ProgramGroups:
    """`main` is the program's default group, for its whole life. `on_lost`: see `RecoverableGroup`."""

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._waiting = Waiting()  # in the program's collectives
        self._asked: RecoverableGroup | None = None  # that c10d makes a group of just now
        self.scope = Scope()
        self.main = self._make()
        self.own: list[RecoverableGroup] = []
        self.evaluations = 0  # that the script has asked for
        self.refusal = ""  # why no member can go on

    def begin(self, most: int) -> None:
        """Make `main` the default group, of a world of one for now. The job may come to have `most` processes."""
        doors.check_first()
        self.scope.others = most > 1
        dist.Backend.register_backend(BACKEND, lambda *_: self._asked or self.main, devices=["cpu", "cuda"])
        dist.init_process_group(BACKEND, store=HashStore(), rank=0, world_size=1)
        self.main.attach(forming.alone(), 0, 1)
        doors.put_up(most, lambda: self._asked is not None, self._new)
        early.refuse_training(lambda: self.scope.others and self.scope.where is At.BUILDING)

    def _make(self) -> RecoverableGroup:
        return RecoverableGroup(self._on_lost, self._waiting, self.scope)

    def for_mesh(self, description: str) -> RecoverableGroup:
        """A group of a mesh, known to c10d. Its members are the mesh's business."""
        return self._register(self._make(), description)

    def _register(self, group: RecoverableGroup, description: str | None) -> RecoverableGroup:
        """Make it known to c10d."""
        self._asked = group
        try:
            dist.new_group([0], backend=BACKEND, group_desc=description)
            return group
        finally:
            self._asked = None

    def _new(self, description: str | None) -> RecoverableGroup:
        """A group of all ranks, for the script."""
        if self.scope.where is not At.BUILDING:
            asked = script_asks(sys._getframe(1))
            raise LoopError(
                f"dist.new_group(){asked.at if asked is not None else ''} after steps() began: a process that comes "
                "later would not make it. Make groups once, between everstep.start() and run.steps()"
            )
        if len(self.own) >= MOST:
            raise LoopError(f"dist.new_group() for the {MOST + 1}th time: make groups once, and use them again")
        group = self._make()
        group.attach(forming.alone(), 0, 1)
        self.own.append(group)
        return self._register(group, description)

    def parts(self, rank: int, world_size: int) -> tuple[forming.Part, ...]:
        """As `forming.form` makes them for a round."""
        return tuple(forming.Part(f"own-{i}", rank, world_size) for i in range(len(self.own)))

    def place(self, rank: int, world_size: int) -> None:
        """Tell the groups, and c10d, of the world that has begun."""
        for group in self.own:
            group.place(rank, world_size)
        for group in (self.main, *self.own):
            distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}

    def stand_in(self, stands_in: Callable[[str], bool] | None, on_rank: Callable[[], None] | None) -> None:
        """Ask `stands_in` for each collective from now on, and call `on_rank` when the rank is asked for."""
        for group in (self.main, *self.own):
            group.stands_in, group.on_rank = stands_in, on_rank

    def abandon(self, reason: str) -> None:
        """The world of one is over."""
        for group in (self.main, *self.own):
            group.abandon(reason)

    @property
    def made(self) -> str:
        """What all members have to have made alike, in words; empty if nothing. Or why none of them can go on."""
        if self.refusal:
            return f"{forming.REFUSED}{self.refusal}"
        if not self.own and not self.evaluations:
            return ""
        return (
            f"{len(self.own)} process groups by dist.new_group() and {self.evaluations} evaluations by run.evaluate()"
        )
