"""Gradients of ranks with different numbers of inputs, inside of DDP's join, beside those of one process.

Ends with an error if one differs: for each way to make DDP, with both divisors, with passes in `no_sync`, where a rank
has no inputs at all, and behind the join; and the parameters where an optimizer steps in one join after the other. Or
if something that cannot be right is not refused.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from everstep.recovery.ddp import uneven_inputs
from everstep.recovery.errors import LoopError
from everstep.train.coordination.group_shutdown import hold_group, quiesce

WAYS: tuple[dict[str, Any], ...] = (
    {}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.0001}, {"gradient_as_bucket_view": True},
)  # fmt: skip
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "leave no_sync() out"), ({"static_graph": True}, "Leave static_graph=True out"),
)  # fmt: skip
JOINED = ((3, 1, 2), (2, 0, 1))  # in two joins of a step
COUNTS = ((0, 2, 1), (3, 1, 2), (1, 1, 0))  # inputs of each rank
DATA = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(torch.nn.Module):
    """A layer is used in deep passes only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (torch.nn.Linear(8, n) for n in (8, 8, 1))

    def forward(self, x: torch.Tensor, deep: bool) -> torch.Tensor:
        x = self.first(x).relu()
        found: torch.Tensor = self.last(x + self.middle(x) if deep else x)
        return found


def loss(model: torch.nn.Module, rank: int, part: int, deep: bool) -> torch.Tensor:
    x = DATA[rank * 5 + part * 11 :][:3]
    return mse_loss(model(x, deep), x.sum(1, keepdim=True))


def expected(model: torch.nn.Module, counts: Sequence[int], deep: bool, *, initial: bool) -> list[Any]:
    """The gradients of one process that has all inputs; None of parameters that no pass uses."""
    found: list[Any] = [None for _ in model.parameters()]
    for part in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if part < count]
        for rank in active:
            passed = torch.autograd.grad(loss(model, rank, part, deep), list(model.parameters()), allow_unused=True)
            for i, gradient in enumerate(passed):
                if gradient is not None:
                    share = gradient / (len(counts) if initial else len(active))
                    found[i] = share if found[i] is None else found[i] + share
    return found


def check(model: torch.nn.Module, wanted: Sequence[Any], what: object) -> None:
    for (name, p), want in zip(model.named_parameters(), wanted, strict=True):
        assert (p.grad is None) == (want is None), (what, name)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, want, rtol=1e-9, atol=1e-12, msg=f"{what} {name}")


class ThroughData(torch.optim.SGD):
    """Changes parameters so that their versions do not tell of it, as many optimizers of other libraries do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(0 if p.grad is None else p.grad, alpha=-group["lr"])


def check_steps(rank: int) -> None:
    """An optimizer steps in two joins, of which a rank has no inputs in the second one, or behind each of them."""
    for kind in (torch.optim.SGD, ThroughData):
        for initial, way in ((True, "clears"), (True, "steps behind"), (True, "leaves out"), (False, "looks")):
            torch.manual_seed(0)
            bare, alone = Net().double(), Net().double()
            alone.load_state_dict(bare.state_dict())
            model = DistributedDataParallel(bare)
            optimizer, single = kind(bare.parameters(), lr=0.05), torch.optim.SGD(alone.parameters(), lr=0.05)
            uneven_inputs.step_begins()
            for counts in JOINED:
                with model.join(divide_by_initial_world_size=initial):
                    for part in range(counts[rank]):
                        if way != "steps behind" or part == 0:
                            optimizer.zero_grad()
                        loss(model, rank, part, True).backward()  # type: ignore[no-untyped-call]
                        if way != "steps behind" and (way != "leaves out" or part != 0):
                            optimizer.step()
                        if way == "looks":
                            with torch.no_grad():
                                loss(model, rank, part, True)
                if way == "steps behind":
                    torch.nn.utils.clip_grad_norm_(bare.parameters(), 1e9)
                    optimizer.step()
                wanted = one_after_the_other(alone, counts, single, initial, way)
                for (name, p), want in zip(bare.named_parameters(), wanted, strict=True):
                    torch.testing.assert_close(p, want, rtol=1e-9, atol=1e-12, msg=f"{kind} {way} {counts} {name}")


def one_after_the_other(
    model: torch.nn.Module, counts: Sequence[int], optimizer: torch.optim.Optimizer, initial: bool, way: str
) -> list[torch.Tensor]:
    """The parameters of one process that makes the passes of a join."""
    if way == "steps behind":
        for p, gradient in zip(model.parameters(), expected(model, counts, True, initial=initial), strict=True):
            p.grad = gradient
        optimizer.step()
    for part in range(max(counts) if way != "steps behind" else 0):
        losses = [loss(model, rank, part, True) for rank, count in enumerate(counts) if part < count]
        optimizer.zero_grad()
        (torch.stack(losses).sum() / (len(counts) if initial else len(losses))).backward()  # type: ignore[no-untyped-call]
        if way != "leaves out" or part != 0:
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def check_refusals(rank: int) -> None:
    """All ranks are refused, also one that has joined. Their collectives match then, so one case follows the other."""
    for way, text in REFUSED:
        model = DistributedDataParallel(Net().double(), **way)
        count, said = COUNTS[0][rank], ""
        try:
            with model.join():
                for part in range(count):
                    with model.no_sync() if part + 1 < count and not way else contextlib.nullcontext():
                        loss(model, rank, part, True).backward()  # type: ignore[no-untyped-call]
        except LoopError as e:
            said = str(e)
        assert text in said, (rank, way, said)
    said = ""
    try:
        DistributedDataParallel(torch.nn.Embedding(4, 4, sparse=True)).join()
    except LoopError as e:
        said = str(e)
    assert "sparse=False" in said, said


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hold_group()
    atexit.register(quiesce)
    rank, everybody = dist.get_rank(), [1] * dist.get_world_size()
    uneven_inputs.install()
    for way in WAYS:
        torch.manual_seed(0)
        bare = Net().double()
        model = DistributedDataParallel(bare, **way)
        for counts in COUNTS:
            for initial, quiet in ((True, False), (False, False), (True, True)):
                deep = not ("find_unused_parameters" in way and initial)
                what = (way, counts, initial, quiet)
                wanted = expected(bare, counts, deep, initial=initial)
                with model.join(divide_by_initial_world_size=initial):
                    for part in range(counts[rank]):
                        with model.no_sync() if quiet and part + 1 < max(counts) else contextlib.nullcontext():
                            loss(model, rank, part, deep).backward()  # type: ignore[no-untyped-call]
                check(bare, wanted, what)
                model.zero_grad()
                loss(model, rank, 0, deep).backward()  # type: ignore[no-untyped-call]
                check(bare, expected(bare, everybody, deep, initial=True), f"behind {what}")
                model.zero_grad()
    check_steps(rank)
    check_refusals(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
