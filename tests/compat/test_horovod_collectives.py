"""Collectives of `everstep_horovod.torch` on three ranks, against what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import everstep_horovod.torch as hvd
from support.compat.ranks import on_ranks

RANKS = 3


def of(rank: int, rows: int = 2) -> torch.Tensor:
    """A tensor [rows, 3] of whole numbers, so that sums are exact in any order."""
    return torch.randint(-50, 50, (rows, 3), generator=torch.Generator().manual_seed(rank)).float()


ALL = [of(rank) for rank in range(RANKS)]
STACKED = torch.stack(ALL)


def everything() -> dict[str, Any]:
    hvd.init()
    rank, mine = hvd.rank(), of(hvd.rank())
    place, kept = mine.clone(), mine.clone()
    slanted = mine.clone().t()
    found: dict[str, Any] = {
        "places": (hvd.size(), hvd.local_rank(), hvd.local_size()),
        "average": hvd.allreduce(mine),
        "sum": hvd.allreduce(mine, op=hvd.Sum),
        "older sum": hvd.allreduce(mine, average=False),
        "min": hvd.allreduce(mine, op=hvd.Min),
        "max": hvd.allreduce(mine, op=hvd.Max),
        "product": hvd.allreduce(mine, op=hvd.Product),
        "scaled": hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
        "whole numbers": hvd.allreduce(torch.tensor([7 * (rank + 1), -5])),
        "small": hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16),
        "grouped": hvd.grouped_allreduce([mine, mine + 1], op=hvd.Sum),
        "gathered": hvd.allgather(of(rank, rank + 1)),
        "grouped gathered": hvd.grouped_allgather([mine, of(rank, rank)]),
        "broadcast": hvd.broadcast(mine, root_rank=1),
        "scattered": hvd.reducescatter(of(rank, 4), op=hvd.Sum),
        "even exchange": hvd.alltoall(torch.arange(RANKS) + 10 * rank),
        "object": hvd.broadcast_object({"of": rank}, root_rank=2),
        "objects": hvd.allgather_object([rank]),
    }
    found["exchange"] = hvd.alltoall(torch.arange(3 * rank), splits=[0, rank, 2 * rank])
    hvd.allreduce_(place, op=hvd.Sum)
    hvd.grouped_allreduce_([slanted], op=hvd.Sum)
    handle = hvd.allreduce_async(mine, op=hvd.Sum)
    found |= {"in place": place, "not contiguous": slanted, "later": hvd.synchronize(handle), "done": hvd.poll(handle)}
    found["later exchange"] = hvd.synchronize(hvd.alltoall_async(torch.arange(RANKS) + 10 * rank))[0]
    assert torch.equal(mine, kept), "a function without an underscore has changed its argument"
    hvd.barrier()
    return found


def test_collectives_give_what_one_process_computes(tmp_path: Path) -> None:
    total = STACKED.sum(0)
    expected = {
        "average": total / RANKS,
        "sum": total,
        "older sum": total,
        "min": STACKED.amin(0),
        "max": STACKED.amax(0),
        "product": STACKED.prod(0),
        "scaled": total,
        "whole numbers": torch.tensor([14, -5]),
        "small": total,
        "grouped": [total, total + RANKS],
        "gathered": torch.cat([of(r, r + 1) for r in range(RANKS)]),
        "grouped gathered": [torch.cat(ALL), torch.cat([of(r, r) for r in range(RANKS)])],
        "broadcast": ALL[1],
        "in place": total,
        "not contiguous": total.t(),
        "later": total,
        "object": {"of": 2},
        "objects": [[0], [1], [2]],
        "done": True,
    }
    rows = sum(of(r, 4) for r in range(RANKS))
    for rank, found in enumerate(on_ranks(RANKS, tmp_path, everything)):
        assert found.pop("places") == (RANKS, rank, RANKS)
        exchanged, counts = found.pop("exchange")
        own = {
            "scattered": (rows[:2], rows[2:3], rows[3:])[rank],
            "even exchange": torch.tensor([rank, 10 + rank, 20 + rank]),
            "later exchange": torch.tensor([rank, 10 + rank, 20 + rank]),
        }
        # Rank r sends r times its place in turn: nothing to rank 0, r to rank 1, 2r to rank 2.
        sent = [torch.arange(3 * r)[(0, 0, r)[rank] : (0, r, 3 * r)[rank]] for r in range(RANKS)]
        assert counts.tolist() == [len(one) for one in sent]
        assert torch.equal(exchanged, torch.cat(sent))
        torch.testing.assert_close(found, expected | own, rtol=0, atol=1e-5)


def gradients() -> dict[str, torch.Tensor | None]:
    hvd.init()
    found = {}
    weight = torch.arange(1.0, 1 + RANKS * 2 * 3).view(-1, 3) * (hvd.rank() + 1)
    for name, call, rows in (
        ("allreduce", hvd.allreduce, 2),
        ("allgather", hvd.allgather, RANKS * 2),
        ("broadcast", lambda x: hvd.broadcast(x, 1), 2),
        ("reducescatter", lambda x: hvd.reducescatter(torch.cat([x, x, x]), op=hvd.Sum), 2),
        ("alltoall", lambda x: hvd.alltoall(torch.cat([x, x, x])), RANKS * 2),
    ):
        x = of(hvd.rank()).requires_grad_()
        (call(x) * weight[:rows]).sum().backward()
        found[name] = x.grad
    return found


def test_gradients_flow_through_collectives(tmp_path: Path) -> None:
    """As Horovod defines them: those of an all-reduce and of a gather are averages over the ranks."""
    rows = torch.arange(1.0, 1 + RANKS * 2 * 3).view(-1, 3)
    factors = [1.0, 2.0, 3.0]
    average = sum(factors) / RANKS
    for rank, found in enumerate(on_ranks(RANKS, tmp_path, gradients)):
        expected = {
            "allreduce": rows[:2] * average,
            "allgather": rows[2 * rank : 2 * rank + 2] * average,
            "broadcast": rows[:2] * (average if rank == 1 else 0),
            "reducescatter": rows[:2] * sum(factors) * RANKS,
            # Each rank's copy of x goes to another rank, which multiplies it by its own rows for this one.
            "alltoall": rows[2 * rank : 2 * rank + 2] * sum(factors),
        }
        torch.testing.assert_close(found, expected)
