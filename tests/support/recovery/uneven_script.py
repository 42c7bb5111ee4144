"""Gradients of ranks with different numbers of inputs, inside of DDP's join, beside those of one process.

Ends with an error if one differs: for each way to make DDP, with both divisors, with passes in `no_sync`, where a rank
has no inputs at all, and behind the join. Or if something that cannot be right is not refused.
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
    uneven_inputs.put_up()
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
    check_refusals(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
