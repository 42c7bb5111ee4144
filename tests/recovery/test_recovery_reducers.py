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


def test_ddp_objects_of_the_process_are_found_and_not_kept_alive() -> None:
    gc.collect()  # those of other tests, which would go with this one
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    found = Reducers()
    assert any(reference() is ddp for reference in found._found)
    before = len(found)
    del ddp
    gc.collect()
    assert len(found) == before - 1
