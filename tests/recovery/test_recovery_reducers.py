"""DDP after its reducer was made anew, by names of torch's that are not public: they are watched here."""

import copy
import gc
import json
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
from torch.nn.parallel import DistributedDataParallel

from everstep.recovery.ddp.reducers import Reducers, rebuild

VARIANTS = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 0.001},
]


pytestmark = pytest.mark.usefixtures("world_of_one")


def gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.long
@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: next(iter(o), "plain"))
def test_gradients_after_a_rebuild_are_those_of_the_bare_module(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    bare = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    ddp = DistributedDataParallel(copy.deepcopy(bare), **options)
    x = torch.randn(5, 4)
    for _ in range(3):
        gradients(ddp, x)  # by now its buckets are ordered
        rebuild(ddp)
        for _ in range(3):
            for a, b in zip(gradients(ddp, x), gradients(bare, x), strict=True):
                assert torch.equal(a, b)


@pytest.mark.long
def test_rebuild_after_a_failed_backward_works() -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)))
    x = torch.randn(5, 4)
    expected = gradients(ddp, x)

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("a peer was lost")

    hook = ddp.module[0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="a peer was lost"):
        gradients(ddp, x)
    hook.remove()
    rebuild(ddp)
    for a, b in zip(gradients(ddp, x), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.long
def test_communication_hook_of_the_script_is_kept() -> None:
    calls: list[int] = []

    def hook(state: list[int], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    ddp.register_comm_hook(calls, hook)
    rebuild(ddp)
    rebuild(ddp)
    gradients(ddp, torch.ones(1, 2))
    assert calls == [0]


class Crossed(torch.nn.Module):
    """Layers that are used in another order than they are registered in, and then in yet another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.a, self.b, self.c) if self.turned else (self.c, self.a, self.b)
        for layer in layers:
            x = layer(x)
        return x


def buckets(ddp: Any, x: torch.Tensor) -> list[list[str]]:
    """The names of the parameters in each bucket of a backward pass."""
    found: list[list[str]] = []
    names = {id(p): name for name, p in ddp.module.named_parameters()}

    def hook(state: list[list[str]], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.append([names[id(p)] for p in bucket.parameters()])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(found, hook)
    gradients(ddp, x)
    return found


def reducers(**state: Any) -> Reducers:
    """Those of these modules."""
    return Reducers(state)


ORDERED = [
    {"bucket_cap_mb": 0.00007},
    {"bucket_cap_mb": 0.00007, "gradient_as_bucket_view": True},
    {"bucket_cap_mb": 0.00007, "static_graph": True},
    {"bucket_cap_mb": 0.00007, "static_graph": True, "find_unused_parameters": True},
]
ARRIVED = [["b.bias", "b.weight"], ["a.bias", "a.weight"], ["c.bias", "c.weight"]]


@pytest.mark.long
@pytest.mark.parametrize("options", ORDERED, ids=lambda o: "-".join(list(o)[1:]) or "plain")
def test_new_reducer_begins_with_the_buckets_that_were_learned_and_keeps_them(options: dict[str, Any]) -> None:
    x = torch.randn(5, 4)
    first = DistributedDataParallel(Crossed(), **options)
    known = reducers(model=first)
    for _ in range(2 if first.static_graph else 1):
        assert known.state_dict() == {"orders": []}
        expected = gradients(first, x)
        known.learn()
    for a, p in zip(expected, first.parameters(), strict=True):
        assert p.grad is not None, "learning took the gradients of the step"
        assert torch.equal(a, p.grad), "learning changed the gradients of the step"
    second = DistributedDataParallel(copy.deepcopy(first.module), **options)
    told = known.state_dict()
    del first, known
    new = reducers(model=second)
    new.load_state_dict(told)
    new.resume()
    for a, b in zip(gradients(second, x), expected, strict=True):
        assert torch.equal(a, b)
    new.rebuild()
    second.module.turned = not second.static_graph  # its gradients come in another order
    gradients(second, x)
    new.learn()
    assert buckets(second, x) == ARRIVED
    assert new.state_dict() == told


@pytest.mark.long
def test_static_graph_with_a_hook_tells_it_the_numbers_that_its_buckets_have() -> None:
    x = torch.randn(5, 4)
    ddp = DistributedDataParallel(Crossed(), bucket_cap_mb=0.00007, static_graph=True)
    numbers: list[int] = []

    def hook(state: list[int], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(numbers, hook)
    known = reducers(model=ddp)
    for _ in range(2):
        gradients(ddp, x)
        known.learn()
    known.rebuild()
    for _ in range(3):
        numbers.clear()
        gradients(ddp, x)
        assert numbers == list(range(len(numbers)))
    assert len(numbers) == 3


@pytest.mark.long
def test_order_of_a_model_with_other_parameters_is_not_taken() -> None:
    first = DistributedDataParallel(Crossed(), bucket_cap_mb=0.00007)
    known = reducers(model=first)
    gradients(first, torch.randn(5, 4))
    known.learn()
    other = DistributedDataParallel(torch.nn.Linear(4, 2))
    told = known.state_dict()
    del first, known
    new = reducers(model=other)
    new.load_state_dict(told)
    new.resume()
    assert new.state_dict() == {"orders": []}
    gradients(other, torch.randn(5, 4))
    new.learn()
    assert [each["order"] for each in new.state_dict()["orders"]] == ["1 0"]


def orders(known: Reducers) -> dict[str, str]:
    return {each["name"]: each["order"] for each in known.state_dict()["orders"]}


@pytest.mark.long
def test_modules_that_are_alike_keep_their_own_orders_by_name_and_untracked_ones_are_left_to_torch() -> None:
    x = torch.randn(5, 4)
    one, two = (DistributedDataParallel(Crossed(), bucket_cap_mb=0.00007) for _ in range(2))
    two.module.turned = True
    known, untracked = reducers(one=one, two=two.module), reducers(other=torch.nn.Linear(2, 2))
    for ddp in (one, two):
        gradients(ddp, x)
    untracked.learn()
    known.learn()
    assert orders(untracked) == {}
    assert orders(known) == {"one": "3 2 1 0 5 4", "two": "5 4 3 2 1 0"}


@pytest.mark.long
def test_parts_of_a_tracked_module_and_modules_around_one_have_names() -> None:
    x = torch.randn(5, 4)
    towers = torch.nn.ModuleDict(
        {name: DistributedDataParallel(Crossed(), bucket_cap_mb=0.00007) for name in ("left", "right")}
    )
    towers["right"].module.turned = True
    inner = Crossed()
    around = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), inner), bucket_cap_mb=0.00007)
    known = reducers(towers=towers, inner=inner)
    for ddp in (*towers.values(), around):
        gradients(ddp, x)
    known.learn()
    assert orders(known) == {
        "inner": "5 4 3 2 7 6 1 0",
        "towers.left.module": "3 2 1 0 5 4",
        "towers.right.module": "5 4 3 2 1 0",
    }


@pytest.mark.long
def test_order_is_learned_after_any_number_of_passes_without_a_backward_one() -> None:
    x = torch.randn(5, 4)
    ddp = DistributedDataParallel(Crossed(), bucket_cap_mb=0.00007)
    known = reducers(model=ddp)
    for _ in range(12):  # torch takes notes of the first ten
        ddp(x)
        known.learn()
    assert orders(known) == {}
    gradients(ddp, x)
    known.learn()
    assert orders(known) == {"model": "3 2 1 0 5 4"}


@pytest.mark.long
def test_gradients_that_are_not_shared_teach_nothing() -> None:
    x = torch.randn(5, 4)
    ddp = DistributedDataParallel(Crossed(), bucket_cap_mb=0.00007)
    known = reducers(model=ddp)
    with ddp.no_sync():
        gradients(ddp, x)
    known.learn()
    assert orders(known) == {}
    gradients(ddp, x)
    known.learn()
    assert orders(known) == {"model": "3 2 1 0 5 4"}


@pytest.mark.long
@pytest.mark.parametrize("order", ["3 2 1 0 5", "3 2 1 0 5 5", "3 2 1 0 5 6", "3 2 1 0 5 4 6", "3 2 1 0 5 x"])
def test_order_that_is_none_of_these_parameters_is_refused(order: str) -> None:
    ddp = DistributedDataParallel(Crossed(), bucket_cap_mb=0.00007)
    known = reducers(model=ddp)
    gradients(ddp, torch.randn(5, 4))
    known.learn()
    told = known.state_dict()
    damaged = copy.deepcopy(told)
    damaged["orders"][0]["order"] = order
    with pytest.raises(ValueError, match=order[:8]):
        known.load_state_dict(damaged)
    assert known.state_dict() == told


@pytest.mark.long
def test_parameters_that_are_frozen_while_a_reducer_is_made_have_their_place_when_they_are_thawed() -> None:
    """A process that comes later makes its own before it hears what the others have frozen."""
    x = torch.randn(5, 4)
    ddp = DistributedDataParallel(Crossed(), bucket_cap_mb=0.00007)
    known = reducers(model=ddp)
    gradients(ddp, x)
    known.learn()
    ddp.module.a.requires_grad_(False)
    known.rebuild()
    assert not any(p.requires_grad for p in ddp.module.a.parameters())
    ddp.module.a.requires_grad_(True)
    assert buckets(ddp, x) == ARRIVED


class Mixed(torch.nn.Module):
    """A rare kind of each: sparse gradients, two types, a frozen layer, a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(7, 4, sparse=True)
        self.wide = torch.nn.Linear(4, 4).double()
        self.frozen = torch.nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.twice = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.twice(self.twice(self.frozen(x)) + self.table(torch.arange(5) % 7))
        return self.wide(y.double())


@pytest.mark.long
def test_sparse_gradients_several_types_and_frozen_parameters_come_right_out_of_a_known_order() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    ddp = DistributedDataParallel(Mixed(), bucket_cap_mb=0.00007)
    known = reducers(model=ddp)
    gradients(ddp, x)
    known.learn()
    assert sorted(orders(known)["model"].split()) == ["0", "1", "2", "3", "4"]
    known.rebuild()
    for _ in range(3):
        for a, b in zip(gradients(ddp, x), gradients(copy.deepcopy(ddp.module), x), strict=True):
            assert torch.equal(a.to_dense(), b.to_dense())


@pytest.mark.long
def test_state_of_a_commit_that_knows_no_order_leaves_the_one_that_is_known() -> None:
    ddp = DistributedDataParallel(Crossed(), bucket_cap_mb=0.00007)
    known = reducers(model=ddp)
    gradients(ddp, torch.randn(5, 4))
    known.learn()
    known.load_state_dict({"orders": []})
    assert orders(known) == {"model": "3 2 1 0 5 4"}


class Told:
    """The members of a round, of whom this one is the last: what the others say and give is given."""

    def __init__(self, others: Reducers) -> None:
        self.rank, self.world_size, self._others = 1, 2, others

    def gather(self, values: tuple[int, ...]) -> list[tuple[int, ...]]:
        self._others.agree(self._Alone(told := []))  # type: ignore[arg-type]
        return [told[0], values]

    def from_rank(self, giver: int, mine: bytes) -> bytes:
        return mine if giver == self.rank else json.dumps(self._others.state_dict()).encode()

    class _Alone:
        def __init__(self, told: list[tuple[int, ...]]) -> None:
            self.rank, self._told = 0, told

        def gather(self, values: tuple[int, ...]) -> list[tuple[int, ...]]:
            self._told.append(values)
            return [values]


@pytest.mark.long_but("first0-second0")
@pytest.mark.parametrize(("first", "second"), [([], ["one"]), (["one"], ["two"]), (["one", "two"], ["two"])])
def test_members_of_a_round_know_the_same_orders(first: list[str], second: list[str]) -> None:
    x = torch.randn(5, 4)
    held = []
    members = []
    for trained in (first, second):
        modules = {name: DistributedDataParallel(Crossed(), bucket_cap_mb=0.00007) for name in ("one", "two")}
        held.append(modules)
        known = reducers(**modules)
        for name in trained:
            gradients(modules[name], x)
        known.learn()
        members.append(known)
    members[1].agree(Told(members[0]))  # type: ignore[arg-type]
    most = max(first, second, key=len)
    assert set(orders(members[1])) == set(most)


@pytest.mark.long
def test_module_that_finds_unused_parameters_is_left_with_the_buckets_that_it_always_has() -> None:
    ddp = DistributedDataParallel(Crossed(), find_unused_parameters=True)
    known = reducers(model=ddp)
    gradients(ddp, torch.randn(5, 4))
    known.learn()
    known.rebuild()
    assert known.state_dict() == {"orders": []}


@pytest.mark.long
def test_hook_of_torch_s_own_is_kept() -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    rebuild(ddp)
    for gradient in gradients(ddp, torch.randn(5, 4)):
        assert torch.equal(gradient, gradient.half().float()), "it was not sent in 16 bits"


@pytest.mark.long
def test_ddp_objects_of_the_process_are_found_and_not_kept_alive() -> None:
    gc.collect()  # those of other tests, which would go with this one
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    found = Reducers({})
    assert any(reference() is ddp for reference in found._references)
    before = len(found)
    del ddp
    gc.collect()
    assert len(found) == before - 1


@pytest.mark.long
def test_ddp_object_that_the_script_dropped_is_not_found_before_it_is_collected() -> None:
    gc.collect()
    before = len(Reducers({}))
    gc.disable()
    try:
        ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
        ddp.held = [ddp]  # a cycle, so that only the collector frees it
        del ddp
        assert len(Reducers({})) == before
    finally:
        gc.enable()
