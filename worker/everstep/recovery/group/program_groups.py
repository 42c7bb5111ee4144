"""The process groups that the program uses: the default group, and those that the script makes.

A script makes groups with `dist.new_group()`: of all ranks, for DDP or for its own metrics; or of some ranks, if
`run.mesh(model=N)` has declared the size of a replica. Each group is made anew in each round, behind a handle that the
script keeps. Invariants: a group has the members of the present round, or none of its collectives succeeds; a group of
some ranks has the same meaning in each round (`meanings`); a group without such a meaning is refused.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from everstep.contract import rank_label
from everstep.recovery.errors import LoopError
from everstep.recovery.forming import forming
from everstep.recovery.group import meanings, torch_functions
from everstep.recovery.group.in_flight import WaitingTime
from everstep.recovery.group.meanings import AcrossReplicas, AllRanks, GroupMeaning, WithinReplica
from everstep.recovery.group.recoverable import BACKEND, RecoverableGroup
from everstep.recovery.group.script_location import NO_SUBGROUPS, ScriptLocation, ScriptPhase, script_call_site
from everstep.recovery.state.shape import MODEL
from everstep.torch_private.groups import set_ranks

# --- before steps
# Refuses to train before `steps`: until then a process is alone, so DDP would not average its gradients. A forward or
# backward pass is allowed before (to compile, to measure memory). A step of an optimizer is allowed too if its module
# is not in DDP, because each process computes the same by itself.


def refuse_training(alone: Callable[[], bool]) -> None:
    """Refuse to train while `alone()` holds. Called once in a process."""
    free: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # of no module in DDP

    def hook(optimizer: Optimizer, *_: Any) -> None:
        if not alone() or optimizer in free:
            return
        wrapped = {id(p) for ddp in gc.get_objects() if type(ddp) is DistributedDataParallel for p in ddp.parameters()}
        if not any(id(p) in wrapped for group in optimizer.param_groups for p in group["params"]):
            free.add(optimizer)
            return
        site = script_call_site(sys._getframe(1))
        raise LoopError(
            f"optimizer.step(){site.at if site is not None else ''} of a model in DistributedDataParallel, before "
            "run.steps(): this process is alone until then, and its gradients are not averaged. Let the loop "
            "be `for step in run.steps(loader, until=STEPS):` and do its work inside `with step as batch:` "
            "(docs/how-to-convert.md)"
        )

    register_optimizer_step_pre_hook(hook)


# --- program groups

MOST = 16  # each has connections of its own in each round


@dataclass(frozen=True, slots=True)
class ScriptGroup:
    """A group of the script: the `nth` one with this meaning."""

    what: GroupMeaning
    nth: int
    group: RecoverableGroup


class ProgramGroups:
    """`main` is the program's default group, for its whole life. `on_lost`: see `RecoverableGroup`."""

    def __init__(self, on_lost: Callable[[str, int], None]) -> None:
        self._on_lost = on_lost
        self._waiting = WaitingTime()  # in the program's collectives
        self._registering: RecoverableGroup | None = None  # the group that is being registered with c10d now
        self.scope = ScriptLocation()
        self.main = self._make()
        self.main.on_point = self._check_peer
        self._own: list[ScriptGroup] = []
        self.own: tuple[RecoverableGroup, ...] = ()  # the script's groups with this process, in the order of `parts`
        # Whether the script divides its model, the ranks of a replica, and the rank that this process assumes.
        self._divided, self.model_size, self._here = False, 1, 0
        self._requested: Counter[tuple[GroupMeaning, int]] = (
            Counter()
        )  # groups that the script has asked for, of any replica
        self._most = 1
        self.asks: Sequence[str] = ()  # the script's other calls, as text
        self.refusal: LoopError | None = None  # the reason why no member can go on

    def begin(self, most: int) -> None:
        """Make `main` the default group, of a world of one for now. The job may have up to `most` processes."""
        torch_functions.check_first()
        self._most = most
        self.scope.others = most > 1
        dist.Backend.register_backend(BACKEND, lambda *_: self._registering or self.main, devices=["cpu", "cuda"])
        hook = sys.excepthook
        dist.init_process_group(BACKEND, store=HashStore(), rank=0, world_size=1)
        sys.excepthook = rank_label.labelled(hook)
        self.main.attach(forming.alone(), 0, 1)
        torch_functions.install(most, lambda: self._registering is not None, self._new)
        refuse_training(lambda: self.scope.others and self.scope.where is ScriptPhase.BUILDING)

    def divide(self, kind: str, model_size: int, rank: int) -> None:
        """Take over the mesh's shape. If the script itself divides its model, over `model_size` neighbours in rank,
        this process keeps the place of `rank`."""
        if kind == MODEL:
            self._divided, self.model_size, self._here = True, model_size, rank % self._most

    def is_across(self, group: object) -> bool:
        """Whether this is a group of the script that consists of one place of all replicas."""
        across = (AcrossReplicas, WithinReplica) if self._most == self.model_size else (AcrossReplicas,)
        what = next((own.what for own in self._own if own.group is group), None)
        return isinstance(what, across) and len(meanings.ranks_of(what, 0, self.model_size, self.model_size)) == 1

    def _make(self) -> RecoverableGroup:
        return RecoverableGroup(self._on_lost, self._waiting, self.scope)

    def for_mesh(self, description: str) -> RecoverableGroup:
        """A group of a mesh, registered with c10d. The mesh sets its members."""
        return self._register(self._make(), description)

    def _register(self, group: RecoverableGroup, description: str | None) -> RecoverableGroup:
        """Register the group with c10d."""
        self._registering = group
        try:
            dist.new_group([0], backend=BACKEND, group_desc=description)
            return group
        finally:
            self._registering = None

    def _new(self, ranks: Sequence[int] | None, description: str | None) -> Any:
        """A group for the script; without `ranks`, of all ranks. If this process is not in it, torch's placeholder for
        non-members."""
        site = script_call_site(sys._getframe(1))
        at = site.at if site is not None else ""
        if self.scope.where is not ScriptPhase.BUILDING:
            raise LoopError(
                f"dist.new_group(){at} after steps() began: a process that comes later would not make it. Make groups "
                "once, between everstep.start() and run.steps()"
            )
        what_nth = meanings.meaning(range(self._most) if ranks is None else ranks, self._most, self.model_size)
        if what_nth is None or not (self._divided or what_nth[0] == AllRanks()):
            raise LoopError(f"dist.new_group({list(ranks or ())}){at}: {NO_SUBGROUPS}")
        what, replica = what_nth
        nth = self._requested[what_nth]
        self._requested[what_nth] += 1
        members = meanings.ranks_of(what, self._here, self._most, self.model_size)
        if self._here not in members or (isinstance(what, WithinReplica) and replica != self._here // self.model_size):
            return dist.GroupMember.NON_GROUP_MEMBER
        if len(self._own) >= MOST:
            raise LoopError(f"dist.new_group(){at} for the {MOST + 1}th time: make groups once, and use them again")
        group = self._register(self._alone(), description)
        if isinstance(what, WithinReplica):
            group.knows_place = True
            self._seat(group, what, self._here, self._most)
        self._own.append(ScriptGroup(what, nth, group))
        self._own.sort(key=lambda own: meanings.order_of(own.what, own.nth))
        self.own = tuple(own.group for own in self._own)
        return group

    def _alone(self) -> RecoverableGroup:
        group = self._make()
        group.attach(forming.alone(), 0, 1)
        return group

    def parts(self, rank: int, world_size: int) -> tuple[forming.Subgroup, ...]:
        """The subgroups that `forming.form` makes for a round."""
        subgroups = []
        for own in self._own:
            ranks = meanings.ranks_of(own.what, rank, world_size, self.model_size)
            name = meanings.name_of(own.what, own.nth, rank, self.model_size)
            subgroups.append(forming.Subgroup(name, ranks.index(rank), len(ranks)))
        return tuple(subgroups)

    def seat_groups(self, rank: int, world_size: int) -> None:
        """Tell the groups, and c10d, of the world that has begun."""
        set_ranks(self.main, {i: i for i in range(world_size)})
        for own in self._own:
            self._seat(own.group, own.what, rank, world_size)

    def _seat(self, group: RecoverableGroup, what: GroupMeaning, rank: int, world_size: int) -> None:
        ranks = meanings.ranks_of(what, rank, world_size, self.model_size)
        group.set_rank(ranks.index(rank), len(ranks))
        set_ranks(group, {member: i for i, member in enumerate(ranks)})

    def _check_peer(self, name: str, rank: int) -> None:
        """Check the rank to which the script sends, or from which it receives. Raises `LoopError` if the world has no
        such rank, because gloo would wait for it."""
        size = self.main._size
        if rank < size or self.scope.where is not ScriptPhase.STEP or not self.scope.others:
            return
        site = script_call_site(sys._getframe(1))
        at = site.at if site is not None else ""
        raise LoopError(
            f"dist.{name}() with rank {rank}{at}: this world has {size} ranks. Those that a script has kept from "
            "before its loop, as it passed them to dist.new_group(), are of the largest world, and change when a "
            f"peer is lost. Name the rank in the step, `run.rank + 1`; or by its place in a group of one replica: "
            f"`dist.{name}(…, group=replica, group_{'dst' if name == 'send' else 'src'}=1)`"
        )

    def stand_in(self, stands_in: Callable[[str], bool] | None, on_rank: Callable[[], None] | None) -> None:
        """From now on, call `stands_in` for each collective, and `on_rank` when the script reads the rank."""
        for group in (self.main, *self.own):
            group.stands_in, group.on_rank = stands_in, on_rank

    def abandon(self, reason: str) -> None:
        """The world of one is over."""
        for group in (self.main, *self.own):
            group.abandon(reason)

    @property
    def made(self) -> str:
        """A text of the groups and calls that must be the same on all members; empty if there are none. If no member
        can go on, the reason for that."""
        if self.refusal is not None:
            return f"{forming.REFUSED if self.refusal.certain else forming.UNCERTAIN}{self.refusal}"
        if (ranks := meanings.lacking(self._requested, self._most // self.model_size, self.model_size)) is not None:
            return (
                f"{forming.REFUSED}dist.new_group({ranks}) was left out, and other replicas have such a group: each "
                "process makes the groups of all replicas, in the same order, as torch asks of a script. Write "
                f"`for first in range(0, run.world_size, {self.model_size}): dist.new_group(…)`, or "
                f"dist.new_subgroups({self.model_size})"
            )
        if not self._requested:
            return "\n".join(self.asks)
        meant = f" ({meanings.words(self._requested)})" if self._divided else ""
        return "\n".join([f"{self._requested.total()} process groups by dist.new_group(){meant}", *self.asks])
