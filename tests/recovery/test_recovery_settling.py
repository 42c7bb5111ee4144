"""A round of a sharded job that is lost half way: what a member tells the next one is what it holds by then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.fsdp import fully_shard

from everstep.recovery.announcements import AnnouncedRound, RoundsOver
from everstep.recovery.ddp.reducers import Reducers
from everstep.recovery.engine import Recovery
from everstep.recovery.forming import forming
from everstep.recovery.group.in_flight import PeerLost
from everstep.recovery.sharding.fsdp import NotRecoverable
from everstep.recovery.transfer import broadcast
from everstep.recovery.transfer.agreement import NoState
from everstep.recovery.transfer.shard_transfer_plan import NEW, MemberShard
from everstep.recovery.transfer.sharded import ShardedState
from everstep.recovery.validity import Validity
from support.recovery.lonely_mesh import mesh_of

pytestmark = pytest.mark.usefixtures("world_of_one")


class Others:
    """The other members of a round, by what they tell. `told` is what this one, of rank 0, has told them."""

    rank = 0

    def __init__(self, *others: MemberShard) -> None:
        self.others = others
        self.told: list[MemberShard] = []

    def gather(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        step, made, validity, shard, digest, parameters = values
        self.told.append(MemberShard(step, made, Validity(validity), shard, digest, parameters))
        others = ((h.step, h.made, int(h.validity), h.shard, h.digest, h.parameters) for h in self.others)
        return [tuple(values), *others]


def member(mesh: Any, others: Others) -> ShardedState:
    model: Any = fully_shard(torch.nn.Linear(4, 7), mesh=mesh.device_mesh)
    found = ShardedState(mesh, others)  # type: ignore[arg-type]
    found.track({"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    return found


def lost() -> int:
    raise PeerLost("a peer was lost while the state was restored")


def nothing() -> None:
    return None


@pytest.mark.parametrize("validity", [Validity.NONE, Validity.WHOLE])
def test_member_whose_restore_was_interrupted_says_that_its_state_is_of_no_use(validity: Validity) -> None:
    # Nobody has shard 1, so all restore; memory holds some of the commit by then, and perhaps another shard's zeros.
    others = Others(MemberShard(0, NEW, validity, 0, 0))
    mine = member(mesh_of(2), others)
    mine.mesh.move(0, 2)
    with pytest.raises(PeerLost):
        mine.synchronize(0, validity, 1, lost)
    others.others = (MemberShard(0, NEW, validity, 1, 0),)
    with pytest.raises(NoState):
        mine.synchronize(0, validity, 2, nothing)
    assert [held.validity for held in others.told] == [validity, Validity.TORN]
    assert mine.synchronize(0, validity, 3, lambda: 40) == (40, "no state was whole in memory")


class Wrapped:
    """A script's own object, in which no module can be seen."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state)


def test_shards_inside_an_object_of_the_scripts_own_are_never_sent_as_if_they_were_the_whole() -> None:
    module: Any = fully_shard(torch.nn.Linear(4, 7), mesh=mesh_of(2).device_mesh)
    with pytest.raises(NotRecoverable, match=r"weight is sharded.* run\.mesh\(shard=N\)"):
        broadcast.send({"app": Wrapped(module)}, 0, (1,), Others())  # type: ignore[arg-type]


class OneRound:
    """An agent that announces one round, and no other."""

    drained = False

    def __init__(self, round_: AnnouncedRound) -> None:
        self.round = round_
        self.joins: list[tuple[int, int]] = []

    def newest(self) -> AnnouncedRound:
        return self.round

    def wait_newer(self, than: int, seconds: float) -> AnnouncedRound:
        if than >= self.round.number:
            raise RoundsOver("there is no other round")
        return self.round

    def joined(self, number: int, step: int, *_: object) -> None:
        self.joins.append((number, step))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30), wait_for_workers=False)


def test_round_that_is_lost_after_the_state_has_come_is_left_with_that_state(store: TCPStore) -> None:
    # Told as what it was before, the step number of one state would go on with the parameters of another.
    rounds = OneRound(AnnouncedRound(3, 0, 1, ("127.0.0.1", store.port)))
    recovery = Recovery(rounds)  # type: ignore[arg-type]
    recovery.main.attach(forming.alone(), 0, 1)
    recovery._sharded = ShardedState(mesh_of(1), recovery.members)
    model: Any = fully_shard(torch.nn.Linear(4, 7), mesh=recovery._sharded.mesh.device_mesh)
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    recovery.track(state, Reducers(state))

    def restore() -> int:
        recovery.round.abandon("a peer was lost just after it had given its state")
        return 40

    assert recovery.enter(0, Validity.NONE, restore, lambda: None) == 40
    assert recovery.round.lost is not None, "the round is over all the same"
    with pytest.raises(PeerLost):
        recovery.main.allreduce([torch.ones(1)]).wait()
    with pytest.raises(RoundsOver):
        recovery.enter(40, Validity.WHOLE, restore, lambda: None)
