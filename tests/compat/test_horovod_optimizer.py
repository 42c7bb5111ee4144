"""`hvd.DistributedOptimizer` on three ranks moves parameters as one process does that has all samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep_horovod.torch as hvd
from everstep.recovery.errors import LoopError
from support.compat.ranks import on_ranks

RANKS, ROWS, STEPS = 3, 6, 4


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def rows(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, 4, generator=drawn).double(), torch.randn(ROWS, 1, generator=drawn).double()


def loss_of(net: nn.Module, step: int, *ranks: int) -> torch.Tensor:
    x, y = (torch.cat(parts) for parts in zip(*(rows(step, rank) for rank in ranks), strict=True))
    return (net(x) - y).square().mean()


def parameters(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def single(passes: int = 1, **options: Any) -> torch.Tensor:
    """The same by one process."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step, *range(RANKS)).backward()
        if (step + 1) % passes == 0:
            optimizer.step()
        schedule.step()
    return parameters(net)


def distributed(**options: Any) -> Callable[[], torch.Tensor]:
    def body() -> torch.Tensor:
        hvd.init()
        net = model()
        if hvd.rank():
            with torch.no_grad():
                net[0].weight.add_(hvd.rank())
        plain = torch.optim.SGD(net.parameters(), lr=0.1 if hvd.rank() == 0 else 7.0, momentum=0.9)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(plain, root_rank=0)
        # A schedule replaces the step of the optimizer that it is given, and changes its learning rate.
        schedule = torch.optim.lr_scheduler.StepLR(plain, 2, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters(), **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, step, hvd.rank()).backward()
            if options.get("op") is hvd.Sum:
                optimizer.synchronize()
                for p in net.parameters():
                    p.grad /= hvd.size()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            schedule.step()
        return parameters(net)

    return body


@pytest.mark.long_but("predivide")
@pytest.mark.parametrize(
    ("options", "close"),
    [({}, 1e-12), ({"gradient_predivide_factor": 2.0}, 1e-12), ({"op": hvd.Sum}, 1e-12),
     ({"compression": hvd.Compression.fp16}, 1e-3)],
    ids=["average", "predivide", "sum", "fp16"],
)  # fmt: skip
def test_parameters_move_as_in_one_process(tmp_path: Path, options: dict[str, Any], close: float) -> None:
    found = on_ranks(RANKS, tmp_path, distributed(**options))
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], single(), rtol=close, atol=close)


def accumulating() -> tuple[torch.Tensor, torch.Tensor, bool]:
    hvd.init()
    net = nn.ModuleList([model(), nn.Linear(2, 1).double()])  # the second module gets gradients on rank 1 alone
    with torch.no_grad():
        net[1].weight.fill_(1.0)
        net[1].bias.fill_(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), backward_passes_per_step=2)
    for step in range(2):
        loss_of(net[0], step, hvd.rank()).backward()
    if hvd.rank() == 1:
        net[1](torch.ones(1, 2).double()).sum().backward()
        net[1](torch.ones(1, 2).double()).sum().backward()
    pending = optimizer.pending
    # On rank 1 the gradients of the second module are under way by now, on the others not. This has as many values.
    metric = hvd.allreduce(torch.full((3,), 1000.0 * hvd.rank()).double())
    assert metric.tolist() == [1000.0] * 3
    optimizer.step()
    return parameters(net[0]), parameters(net[1]), pending and not optimizer.pending


def test_gradients_are_summed_over_passes_and_missing_ones_are_zeros(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        loss_of(net, step, *range(RANKS)).backward()
    optimizer.step()
    for first, second, pending in on_ranks(RANKS, tmp_path, accumulating):
        torch.testing.assert_close(first, parameters(net))
        # Two passes with a gradient of 1 on one of three ranks.
        torch.testing.assert_close(second, torch.tensor([1.0, 1.0, 0.0]).double() - 0.1 * 2 / RANKS)
        assert pending


def refusals() -> dict[str, str]:
    hvd.init()
    net = model()

    def make(**options: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **options)

    def twice() -> None:
        optimizer = make()
        loss_of(net, 0, 0).backward()
        try:
            loss_of(net, 0, 0).backward()
        finally:
            optimizer.zero_grad()

    def added_later() -> None:
        optimizer = make()
        extra = nn.Parameter(torch.ones(2).double())
        optimizer.add_param_group({"params": [extra]})
        extra.sum().backward()
        optimizer.step()

    calls: dict[str, Callable[[], Any]] = {
        "closure": lambda: make().step(lambda: 0),
        "adasum": lambda: make(op=2),
        "minimum": lambda: make(op=hvd.Min),
        "of two": lambda: hvd.DistributedOptimizer(make()),
        "unnamed": lambda: make(named_parameters=[("w", next(net.parameters()))]),
        "same name": lambda: make(named_parameters=[("w", p) for p in net.parameters()]),
        "skip": lambda: make().skip_synchronize().__enter__(),
        "set": lambda: make(process_set=[0]),
        "twice": twice,
        "added later": added_later,
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "nothing was raised"
        except LoopError as e:
            found[name] = str(e)
    return found


def test_what_would_train_wrong_is_refused(tmp_path: Path) -> None:
    (found,) = on_ranks(1, tmp_path, refusals)
    for name, words in {
        "closure": "call loss.backward()", "adasum": "use op=hvd.average", "minimum": "op=min",
        "of two": "averaged twice", "unnamed": "3 of the optimizer's 4 parameters", "same name": "w twice",
        "skip": "optimizer.synchronize()", "set": "run.mesh(model=n)", "twice": "backward_passes_per_step=",
        "added later": "not averaged",
    }.items():  # fmt: skip
        assert words in found[name].lower(), f"{name}: {found[name]}"
