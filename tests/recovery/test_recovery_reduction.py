"""What DDP does not average is not trained on, and what only one rank has is not lost, in silence."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from everstep.recovery.ddp.checks import check_hooks
from everstep.recovery.ddp.reducers import Reducers, rebuild
from everstep.recovery.errors import LoopError
from everstep.train.guards.gradient_reduction import GradientReduction
from everstep.train.guards.replicas import Replicas
from everstep.train.guards.untracked.untracked_state import UntrackedStateCheck

pytestmark = pytest.mark.usefixtures("world_of_one")


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


class Loop:
    """One script's model and optimizer, watched as in a session's loop."""

    def __init__(self, ddp: Any, *, lasts: bool = False) -> None:
        self.ddp = ddp
        self.optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        state = {"model": ddp, "optimizer": self.optimizer}
        self._untracked_check = UntrackedStateCheck(state)
        self.reducers = Reducers(state)
        self._watch = GradientReduction(state, self.reducers, self._untracked_check, lasts=lasts)

    def step(self, model: Any = None) -> None:
        self._untracked_check.begins()
        self.optimizer.zero_grad()
        (model or self.ddp)(torch.ones(2, 3)).sum().backward()
        self.optimizer.step()
        self._untracked_check.over()


@pytest.mark.long
def test_parameter_that_required_no_gradient_when_ddp_was_made_is_refused_once_it_learns() -> None:
    module = net()
    module[0].requires_grad_(False)
    loop = Loop(DistributedDataParallel(module))
    loop.step()
    module[0].requires_grad_(True)
    before = module[0].weight.detach().clone()
    with pytest.raises(LoopError, match=r"model\.0\.weight: requires_grad was switched on.*find_unused_parameters"):
        loop.step()
    assert torch.equal(module[0].weight, before)  # type: ignore[arg-type]


@pytest.mark.long
def test_parameter_that_joins_the_module_and_its_optimizer_later_is_refused() -> None:
    module = net()
    loop = Loop(DistributedDataParallel(module))
    loop.step()
    module.append(torch.nn.Linear(2, 2))
    loop.optimizer.add_param_group({"params": list(module[2].parameters())})
    with pytest.raises(LoopError, match=r"2\.weight: requires_grad was switched on"):
        loop.step()


@pytest.mark.long
def test_parameter_that_a_ddp_made_in_the_loop_averages_is_trained_in_a_world_that_lasts() -> None:
    module = net()
    module[0].requires_grad_(False)
    loop = Loop(DistributedDataParallel(module), lasts=True)
    loop.step()
    module[0].requires_grad_(True)
    later = DistributedDataParallel(module)
    loop.step(later)


@pytest.mark.long_but("view")
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["plain", "view"])
def test_layer_that_is_frozen_behind_ddp_is_refused_in_that_step(options: dict[str, Any]) -> None:
    module = net()
    loop = Loop(DistributedDataParallel(module, **options))
    loop.step()
    module[0].requires_grad_(False)
    before = module[1].weight.detach().clone()
    with pytest.raises(LoopError, match=r"model\.0\.weight: requires_grad was switched off.*find_unused_parameters"):
        loop.step()
    assert torch.equal(module[1].weight, before)  # type: ignore[arg-type]


@pytest.mark.long
def test_layer_that_is_frozen_and_thawed_behind_ddp_that_looks_for_unused_ones_is_averaged() -> None:
    module = net()
    loop = Loop(DistributedDataParallel(module, find_unused_parameters=True))
    module[0].requires_grad_(False)
    loop.step()
    module[0].requires_grad_(True)
    loop.step()


@pytest.mark.long
def test_module_that_is_frozen_as_a_whole_while_another_learns_is_let_through() -> None:
    """As a discriminator is while the generator learns."""
    judge = net()
    loop = Loop(DistributedDataParallel(judge))
    loop.step()
    judge.requires_grad_(False)
    other = torch.ones(2, 3, requires_grad=True)
    loop._untracked_check.begins()
    loop.ddp(other).sum().backward()
    loop.optimizer.step()
    loop._untracked_check.over()
    judge.requires_grad_(True)
    loop.step()


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_reducer_that_is_made_anew_while_a_layer_is_frozen_averages_it_when_it_is_thawed(when: str) -> None:
    seen: list[set[str]] = []

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append({names[id(p)] for p in bucket.parameters()})
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    module = net()
    names = {id(p): name for name, p in module.named_parameters()}
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    ddp.register_comm_hook(None, hook)
    module[0].requires_grad_(False)
    state = {"model": ddp}
    if when == "before":
        reducers = Reducers(state)
        reducers.rebuild()
    else:
        rebuild(ddp)
    assert not module[0].weight.requires_grad
    module[0].requires_grad_(True)
    ddp(torch.ones(2, 3)).sum().backward()
    assert set.union(*seen) == set(names.values())


@pytest.mark.long
def test_frozen_layer_stays_out_of_a_reducer_that_never_had_it() -> None:
    module = net()
    module[0].requires_grad_(False)
    ddp = DistributedDataParallel(module)
    module[0].requires_grad_(True)
    module[1].bias.requires_grad_(False)
    assert {id(p) for p in Reducers({"model": ddp}).reduced(ddp)} == {id(p) for p in module[1].parameters()}


# Ranks that have buffers of their own.


class Ranks:
    """`each(rank, same)` on two ranks at once; `same` compares their numbers as a collective does."""

    def __init__(self) -> None:
        self._told = [0, 0]
        self._here = threading.Barrier(2)

    def play(self, each: Callable[[int, Callable[[int], bool]], None]) -> list[BaseException | None]:
        errors: list[BaseException | None] = [None, None]

        def one(rank: int) -> None:
            try:
                each(rank, lambda number: self._same(rank, number))
            except BaseException as e:  # for the test to look at
                errors[rank] = e

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return errors

    def _same(self, rank: int, number: int) -> bool:
        self._told[rank] = number
        self._here.wait(20)
        alike = self._told[0] == self._told[1]
        self._here.wait(20)
        return alike


def compared(*free: str, broadcast: bool = False, moved: str = "3.running_mean") -> list[BaseException | None]:
    """Two ranks after a step in which one has moved a buffer."""

    def each(rank: int, same: Callable[[int], bool]) -> None:
        with lock:
            torch.manual_seed(0)  # as DDP would make them equal
            layers = [torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)]
            module = torch.nn.Sequential(*layers)
            ddp = DistributedDataParallel(module, broadcast_buffers=broadcast)
        replicas = Replicas({"model": ddp}, [ddp], lambda name: name in free)
        if rank and moved:
            module.get_buffer(moved).add_(1)
        replicas.completed(2, same)

    lock = threading.Lock()
    return Ranks().play(each)


def test_buffer_that_is_each_ranks_own_is_refused_by_its_name_on_all_ranks() -> None:
    for error in compared():
        assert isinstance(error, LoopError)
        assert "different values of model.3.running_mean" in str(error)
        assert "run.untracked('model.3.running_mean')" in str(error)


@pytest.mark.parametrize(
    "arguments",
    [{"moved": ""}, {"broadcast": True}, {"free": ("model.3.running_mean",)}],
    ids=["alike", "rank 0's", "may be lost"],
)
def test_buffers_that_are_nobodys_own_are_let_through(arguments: dict[str, Any]) -> None:
    assert compared(*arguments.pop("free", ()), **arguments) == [None, None]


class Holder:
    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("kind", ["list", "tensor", "array", "object"])
def test_tracked_values_that_differ_between_ranks_are_refused_by_their_name_on_all(kind: str) -> None:
    kinds: dict[str, Callable[[float], Any]] = {
        "list": lambda n: [torch.full((2,), n)],
        "tensor": lambda n: torch.full((2,), n),
        "array": lambda n: np.full(2, n),
        "object": Holder,
    }

    def each(rank: int, same: Callable[[int], bool]) -> None:
        with lock:
            torch.manual_seed(0)
            model = net()
        state = {"model": model, "alike": {"n": 1, "t": torch.ones(2)}, "recent": kinds[kind](float(rank))}
        Replicas(state, [], lambda name: name == "recent").completed(2, same)
        Replicas(state, [], kept=False).completed(2, same)
        Replicas(state, []).completed(2, same)

    lock = threading.Lock()
    for error in Ranks().play(each):
        assert isinstance(error, LoopError)
        assert "different values of recent, which is tracked" in str(error)
        assert "run.untracked('recent')" in str(error)


@pytest.mark.parametrize("is_tensor", [True, False])
def test_entry_of_a_tracked_dictionary_that_differs_is_named_and_a_ranks_own_tensor_is_not_to_be_summed(
    is_tensor: bool,
) -> None:
    def each(rank: int, same: Callable[[int], bool]) -> None:
        with lock:
            torch.manual_seed(0)
            model = net()
        own = [torch.full((2,), float(rank))] if is_tensor else float(rank)
        Replicas({"model": model, "carried": {"n": 1, "hidden": own, "t": torch.ones(2)}}, []).completed(2, same)

    lock = threading.Lock()
    for error in Ranks().play(each):
        assert isinstance(error, LoopError)
        assert "different values of carried['hidden'], which is tracked" in str(error)
        assert "run.untracked('carried')" in str(error)
        assert ("nor summed over the ranks: write it as docs/how-to-restructure.md" in str(error)) == is_tensor


# Hooks.


def test_hook_with_a_state_is_refused_where_commits_lack_it_unless_it_may_be_lost() -> None:
    ddp = DistributedDataParallel(net())
    ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    with pytest.raises(LoopError, match=r"powerSGD_hook keeps.*run\.untracked\('PowerSGDState'\)"):
        check_hooks([ddp], lambda _: False)
    check_hooks([ddp], lambda name: name == "PowerSGDState")


class Rests:
    """The state of a hook that commits can hold."""

    def state_dict(self) -> dict[str, int]:
        return {"steps": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_hook_whose_state_is_tracked_is_let_through() -> None:
    ddp, state = DistributedDataParallel(net()), Rests()
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    with pytest.raises(LoopError, match=r"in a Rests.*pass it to run\.track\(\)"):
        check_hooks([ddp], lambda _: False, [Rests()])
    check_hooks([ddp], lambda _: False, [Rests(), state])


def test_hook_whose_state_only_says_how_is_let_through() -> None:
    ddp = DistributedDataParallel(net())
    ddp.register_comm_hook(torch.bfloat16, powerSGD_hook.powerSGD_hook)
    check_hooks([ddp], lambda _: False)
