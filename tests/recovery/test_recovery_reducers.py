"""DDP after its reducer was made anew, by names of torch's that are not public: they are watched here."""

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep.train.recovery.reducers import Reducers, rebuild

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


def test_communication_hook_of_the_script_is_kept() -> None:
    calls: list[int] = []

    def hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
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

    def hook(state: list[list[str]], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.append([names[id(p)] for p in bucket.parameters()])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(found, hook)
    gradients(ddp, x)
    return found


def reducers(**state: Any) -> Reducers:
    """Those of these modules, and of no other test's."""
    gc.collect()
    return Reducers(state)


ORDERED = [
    {"bucket_cap_mb": 0.00007},
    {"bucket_cap_mb": 0.00007, "gradient_as_bucket_view": True},
    {"bucket_cap_mb": 0.00007, "static_graph": True},
    {"bucket_cap_mb": 0.00007, "static_graph": True, "find_unused_parameters": True},
]
ARRIVED = [["b.bias", "b.weight"], ["a.bias", "a.weight"], ["c.bias", "c.weight"]]


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


def test_static_graph_with_a_hook_tells_it_the_numbers_that_its_buckets_have() -> None:
    x = torch.randn(5, 4)
    ddp = DistributedDataParallel(Crossed(), bucket_cap_mb=0.00007, static_graph=True)
    numbers: list[int] = []

    def hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
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
    assert [each["order"] for each in new.state_dict()["orders"]] == [[1, 0]]


def test_modules_that_are_alike_keep_their_own_orders_by_name_and_nameless_ones_are_left_to_torch() -> None:
    x = torch.randn(5, 4)
    one, two = (DistributedDataParallel(Crossed(), bucket_cap_mb=0.00007) for _ in range(2))
    two.module.turned = True
    known, nameless = reducers(one=one, two=two.module), reducers()
    for ddp in (one, two):
        gradients(ddp, x)
    nameless.learn()
    known.learn()
    assert nameless.state_dict() == {"orders": []}
    assert {each["name"]: each["order"] for each in known.state_dict()["orders"]} == {
        "one": [3, 2, 1, 0, 5, 4],
        "two": [5, 4, 3, 2, 1, 0],
    }


def test_module_that_finds_unused_parameters_is_left_with_the_buckets_that_it_always_has() -> None:
    ddp = DistributedDataParallel(Crossed(), find_unused_parameters=True)
    known = reducers(model=ddp)
    gradients(ddp, torch.randn(5, 4))
    known.learn()
    known.rebuild()
    assert known.state_dict() == {"orders": []}


def test_hook_of_torch_s_own_is_kept() -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    rebuild(ddp)
    for gradient in gradients(ddp, torch.randn(5, 4)):
        assert torch.equal(gradient, gradient.half().float()), "it was not sent in 16 bits"


def test_ddp_objects_of_the_process_are_found_and_not_kept_alive() -> None:
    gc.collect()  # those of other tests, which would go with this one
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    found = Reducers({})
    assert any(reference() is ddp for reference in found._found)
    before = len(found)
    del ddp
    gc.collect()
    assert len(found) == before - 1
