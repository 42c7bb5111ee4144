"""`ZeroRedundancyOptimizer`: its parts go to other ranks and through commits without a changed bit, or are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

import everstep
from everstep.checkpoint import StateMismatch
from everstep.checkpoint.state.divided import DividedOptimizer, by_parts
from everstep.recovery.group.in_flight import PeerLost
from everstep.recovery.group.members import Members
from everstep.recovery.sharding.fsdp import NotRecoverable
from everstep.recovery.transfer import replicated
from everstep.recovery.transfer.agreement import NoState
from everstep.recovery.transfer.divided_optimizers import DividedOptimizers, Partition, check, sources
from everstep.recovery.validity import Validity
from support.compat.ranks import on_ranks

pytestmark = pytest.mark.timeout(300)
STEPS = 3  # before a round or a commit


def network(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
    )


def grouped(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The first group has one parameter, so most ranks have nothing of it."""
    first, *others = model.parameters()
    return [{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.01}]


def divided(model: torch.nn.Module, **options: Any) -> Any:
    return ZeroRedundancyOptimizer(grouped(model), torch.optim.Adam, **options)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """The same gradients on each rank."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)  # as a schedule does
        optimizer.step()


def undivided(last: int = STEPS) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = torch.optim.Adam(grouped(model))
    train(model, optimizer, 0, last)
    return model, optimizer


def assert_is_part(model: torch.nn.Module, optimizer: Any, parts: int, part: int, last: int = STEPS) -> set[int]:
    """This rank has the bits of the undivided training, and moments of its own parameters only: their numbers."""
    want_model, want = undivided(last)
    for mine, theirs in zip(model.parameters(), want_model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert (optimizer.world_size, optimizer.rank) == (parts, part)
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in want.param_groups]
    whole = want.state_dict()["state"]
    told = DividedOptimizer(optimizer).state_dict()["state"]
    for number, values in told.items():
        assert values.keys() == whole[number].keys()
        assert all(torch.equal(value, whole[number][name]) for name, value in values.items()), number
    assert told.keys() == DividedOptimizer(optimizer).numbers()
    return set(told)


def hold(model: torch.nn.Module, optimizer: Any, partition: Partition) -> None:
    """Take a part of the trained state."""
    want_model, want = undivided()
    model.load_state_dict(want_model.state_dict())
    DividedOptimizers({"optimizer": optimizer}).spoil(partition)
    DividedOptimizer(optimizer).load_state_dict(want.state_dict())


@contextmanager
def group() -> Iterator[Members]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield Members(dist.group.WORLD)  # type: ignore[arg-type]
    dist.destroy_process_group()


def none() -> None:
    return None


def settled(
    members: Members,
    partition: Partition,
    step: int = STEPS,
    validity: Validity = Validity.WHOLE,
    start: Callable[[], int | None] = none,
    view: bool = False,
) -> tuple[torch.nn.Sequential, Any, int]:
    """A member that holds this part comes into a new round."""
    model = network(seed=members.rank)
    optimizer = divided(model, parameters_as_bucket_view=view)
    state = {"model": model, "optimizer": optimizer}
    hold(model, optimizer, partition)
    if validity is Validity.NONE:
        model.load_state_dict(network(seed=members.rank).state_dict())
        DividedOptimizers(state).spoil(partition)
        optimizer.param_groups[0]["lr"] = 7.0
    found, _ = replicated.synchronize(state, members, step, validity, start, DividedOptimizers(state))
    return model, optimizer, found


def rounds() -> list[set[int]]:
    held = []
    with group() as members:
        rank = members.rank
        # Two members that trained become four: the parts were on ranks 3 and 1. With views of buckets, too.
        for view in (False, True):
            old = {3: Partition(2, 0), 1: Partition(2, 1)}.get(rank, Partition(1, 0))
            validity = Validity.WHOLE if rank in (1, 3) else Validity.NONE
            model, optimizer, found = settled(members, old, STEPS if rank in (1, 3) else 0, validity, view=view)
            assert found == STEPS
            held.append(assert_is_part(model, optimizer, 4, rank))
            train(model, optimizer, STEPS, STEPS + 2)
            held.append(assert_is_part(model, optimizer, 4, rank, STEPS + 2))
        # All have changed places.
        model, optimizer, _ = settled(members, Partition(4, 3 - rank))
        held.append(assert_is_part(model, optimizer, 4, rank))
        # Four of five members are left, or one has made a step more: that is no whole state.
        for partition, step in ((Partition(5, rank + 1), STEPS), (Partition(4, rank), STEPS + (rank == 2))):
            model, optimizer, found = settled(members, partition, step, start=lambda: 40)
            assert found == 40
            assert (optimizer.world_size, optimizer.rank) == (4, rank)
            assert not optimizer.optim.state, "what is left of the old state must not be taken for the commit's"
            with pytest.raises(NoState, match=r"part .* of the optimizer's state is lost .* nothing is committed"):
                settled(members, partition, step)
        # A new job of which nothing is committed has what rank 0's script made.
        model, optimizer, _ = settled(members, Partition(1, 0), 0, Validity.NONE)
        assert (optimizer.world_size, optimizer.rank) == (4, rank)
        assert torch.equal(next(model.parameters()), next(network(seed=0).parameters()))
    return held


def test_parts_go_to_their_ranks_of_a_new_round_or_all_load_the_commit(tmp_path: Path) -> None:
    for numbers in zip(*on_ranks(4, tmp_path, rounds), strict=True):
        assert sorted(number for mine in numbers for number in mine) == list(range(8)), "each part on one rank"


def interrupted() -> Any:
    """A restore that is interrupted leaves no state that counts, an exchange leaves the old one."""
    with group() as members:

        def lost() -> int:
            raise PeerLost("in the middle of the restore")

        model = network()
        optimizer = divided(model)
        state = {"model": model, "optimizer": optimizer}
        held = DividedOptimizers(state)
        hold(model, optimizer, Partition(3, members.rank))
        with pytest.raises(PeerLost):
            replicated.synchronize(state, members, STEPS, Validity.WHOLE, lost, held)
        assert held.spoiled
        with pytest.raises(NoState):
            replicated.synchronize(state, members, STEPS, Validity.WHOLE, none, held)
        hold(model, optimizer, Partition(2, members.rank))
        with pytest.raises(PeerLost), held.divided(Partition(2, 1 - members.rank)):
            lost()
        return assert_is_part(model, optimizer, 2, members.rank)


def test_interrupted_change_leaves_the_old_part_or_none(tmp_path: Path) -> None:
    one, other = on_ranks(2, tmp_path, interrupted)
    assert not one & other


def recommitted(old: Path, new: Path, **options: Any) -> set[int]:
    """Load, train on, and commit."""
    with group() as members:
        model = network(seed=1)
        optimizer = divided(model, **options)
        state = by_parts({"model": model, "optimizer": optimizer})
        step = everstep.load(old, state).step
        held = assert_is_part(model, optimizer, members.world_size, members.rank, step)
        train(model, optimizer, step, step + 1)
        with everstep.Checkpointer(new) as checkpointer:
            checkpointer.save(step + 1, state)
    return held


def test_commit_goes_through_other_numbers_of_ranks_and_to_and_from_an_undivided_optimizer(tmp_path: Path) -> None:
    model, optimizer = undivided()
    with everstep.Checkpointer(tmp_path / "of-1") as checkpointer:
        checkpointer.save(STEPS, {"model": model, "optimizer": optimizer})
    for before, ranks in ((1, 4), (4, 2), (2, 3)):
        old, new = tmp_path / f"of-{before}", tmp_path / f"of-{ranks}"
        change = partial(recommitted, old, new, parameters_as_bucket_view=ranks == 2)
        held = on_ranks(ranks, tmp_path, change)
        assert sorted(number for mine in held for number in mine) == list(range(8))
    last = network(seed=1)
    whole = torch.optim.Adam(grouped(last))
    assert everstep.load(tmp_path / "of-3", {"model": last, "optimizer": whole}).step == STEPS + 3
    want_model, want = undivided(STEPS + 3)
    assert all(torch.equal(p, q) for p, q in zip(last.parameters(), want_model.parameters(), strict=True))
    for number, values in want.state_dict()["state"].items():
        assert all(torch.equal(v, whole.state_dict()["state"][number][name]) for name, v in values.items())
    assert [g["lr"] for g in whole.param_groups] == [g["lr"] for g in want.param_groups]


@pytest.mark.usefixtures("world_of_one")
def test_commit_of_another_optimizer_is_refused_by_its_class_or_parameters(tmp_path: Path) -> None:
    model, optimizer = undivided()
    with everstep.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer})
    mine = network(seed=1)
    other = ZeroRedundancyOptimizer(grouped(mine), torch.optim.RMSprop)
    with pytest.raises(StateMismatch, match=r"state of Adam, .* RMSprop: .*optimizer_class=torch\.optim\.Adam"):
        everstep.load(tmp_path, by_parts({"model": mine, "optimizer": other}))
    turned = ZeroRedundancyOptimizer([*mine.parameters()][::-1], torch.optim.Adam, lr=0.1)
    with pytest.raises(StateMismatch, match="the same ones in the same order"):
        everstep.load(tmp_path, by_parts({"model": mine, "optimizer": turned}))


@pytest.mark.usefixtures("world_of_one")
def test_what_cannot_be_divided_anew_is_refused_by_name() -> None:
    parts = {"optimizer": divided(network())}
    check(parts, meshed=False)
    with pytest.raises(NotRecoverable, match=r"Leave run\.mesh\(\) out.*fully_shard"):
        check(parts, meshed=True)
    with pytest.raises(StateMismatch, match=r"run\.mesh\(model=N\)"):
        by_parts(parts, model_size=2)
    early = {"optimizer": ZeroRedundancyOptimizer(network().parameters(), torch.optim.Adam, overlap_with_ddp=True)}
    with pytest.raises(NotRecoverable, match=r"overlap_with_ddp=True.*Leave overlap_with_ddp out"):
        check(early, meshed=False)
    with pytest.raises(StateMismatch, match="Leave overlap_with_ddp out"):
        by_parts(early)
    joint = {"optimizer": ZeroRedundancyOptimizer(network().parameters(), torch.optim.LBFGS)}
    with pytest.raises(NotRecoverable, match="LBFGS without ZeroRedundancyOptimizer"):
        check(joint, meshed=False)
    with pytest.raises(StateMismatch, match="LBFGS without ZeroRedundancyOptimizer"):
        by_parts(joint)
    within = {"optimizer": divided(network(), process_group=dist.new_group([0]))}
    with pytest.raises(NotRecoverable, match="Leave process_group out"):
        check(within, meshed=False)


def test_parts_of_two_partitions_are_never_put_together() -> None:
    assert sources([Partition(2, 1), None, Partition(3, 0), Partition(2, 0)]) == [3, 0]
    with pytest.raises(NoState, match="part 1 of 2 and 0, 2 of 3 of the optimizer's state"):
        sources([Partition(2, 0), Partition(3, 1)])
