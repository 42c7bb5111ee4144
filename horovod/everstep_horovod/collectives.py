"""Horovod's collectives over torch.distributed's.

Collectives run in the order in which a rank calls them, so all ranks must call the same ones in the same order; Horovod
matches them by name. `name` is taken and not used. Gradients flow through the functions that return a new tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from everstep.recovery.errors import LoopError
from everstep_horovod.compression import Compression
from everstep_horovod.errors import INSTEAD, refusal
from everstep_horovod.handles import AsWork, Handle, failures, together
from everstep_horovod.world import current

Tensors = Sequence[torch.Tensor]


class Op(IntEnum):
    """How an all-reduce combines the ranks' values."""

    Average = 0
    Sum = 1
    Adasum = 2  # refused
    Min = 3
    Max = 4
    Product = 5


_REDUCE_OPS = {Op.Average: dist.ReduceOp.SUM, Op.Sum: dist.ReduceOp.SUM, Op.Min: dist.ReduceOp.MIN,
           Op.Max: dist.ReduceOp.MAX, Op.Product: dist.ReduceOp.PRODUCT}  # fmt: skip


class GlobalProcessSet:
    """All ranks: the one process set that is here."""

    process_set_id = 0

    def size(self) -> int:
        return current().size

    def rank(self) -> int:
        return current().rank

    def included(self) -> bool:
        return True


global_process_set = GlobalProcessSet()


def checked(process_set: Any) -> None:
    """Raises `LoopError` for a process set of some ranks."""
    if process_set is not None and process_set is not global_process_set:
        raise LoopError(f"process_set={process_set!r}: {INSTEAD['ProcessSet']}")


def chosen(op: Op | None, average: bool | None = None) -> Op:
    """The operation of a call; `average` is Horovod's older way to say it. Raises `LoopError`."""
    if op is not None and average is not None:
        raise LoopError("average=… and op=… were both given: write op=hvd.Average or op=hvd.Sum alone")
    if average is not None:
        return Op.Average if average else Op.Sum
    operation = Op.Average if op is None else Op(op)
    if operation is Op.Adasum:
        raise refusal("Adasum")
    return operation


def begin_allreduce(tensor: torch.Tensor, op: Op, before: float = 1.0, after: float = 1.0, group: Any = None) -> Handle:
    """Begin to reduce a tensor in place, times `before` on each rank and times `after` at the end. `group`: of all
    ranks; the script's if none is given."""
    if tensor.is_sparse:
        raise refusal("sparse_allreduce_async")
    current().check("allreduce")
    data = tensor.detach()
    moved = data if data.is_contiguous() else data.contiguous()
    if before != 1.0:
        moved.mul_(before)
    with failures():
        work = dist.all_reduce(moved, op=_REDUCE_OPS[op], group=group, async_op=True)

    def finish() -> torch.Tensor:
        if op is Op.Average:
            if moved.is_floating_point() or moved.is_complex():
                moved.div_(current().size)
            else:
                moved.div_(current().size, rounding_mode="trunc")
        if after != 1.0:
            moved.mul_(after)
        if moved is not data:
            data.copy_(moved)
        return tensor

    return Handle([work], finish)


def begin_allgather(tensor: torch.Tensor) -> Handle:
    """Begin to join the ranks' tensors by their first dimension, in which they may differ."""
    current().check("allgather")
    data = tensor.detach().contiguous()
    rows = _of_all(_rows(data))
    # gloo gathers equal sizes alone, so shorter tensors are filled up.
    sent = data.new_zeros(max(rows), *data.shape[1:])
    sent[: len(data)] = data
    gathered = [torch.empty_like(sent) for _ in rows]
    with failures():
        work = dist.all_gather(gathered, sent, async_op=True)
    return Handle([work], lambda: torch.cat([part[:length] for part, length in zip(gathered, rows, strict=True)]))


def begin_broadcast(tensor: torch.Tensor, root_rank: int) -> Handle:
    """Begin to give all ranks, in place, the tensor of `root_rank`."""
    current().check("broadcast")
    data = tensor.detach()
    moved = data if data.is_contiguous() else data.contiguous()
    with failures():
        work = dist.broadcast(moved, root_rank, async_op=True)

    def finish() -> torch.Tensor:
        if moved is not data:
            data.copy_(moved)
        return tensor

    return Handle([work], finish)


def begin_alltoall(tensor: torch.Tensor, splits: torch.Tensor | None) -> Handle:
    """Begin to send `splits[r]` rows to each rank r. The result: the rows that came, and how many from each rank."""
    current().check("alltoall")
    size, rank = current().size, current().rank
    data = tensor.detach().contiguous()
    if splits is None:
        if len(data) % size:
            raise LoopError(f"hvd.alltoall() of {len(data)} rows over {size} ranks: pass splits=")
        splits = torch.full((size,), len(data) // size, dtype=torch.int32)
    give = [int(rows) for rows in splits]
    if len(give) != size or sum(give) != len(data):
        raise LoopError(f"hvd.alltoall(splits={give}): {size} numbers with the sum {len(data)} are expected")
    splits_by_rank = [torch.empty(size, dtype=torch.int64) for _ in range(size)]
    with failures():
        dist.all_gather(splits_by_rank, torch.tensor(give))
    take = [int(rows[rank]) for rows in splits_by_rank]
    output = data.new_empty(sum(take), *data.shape[1:])
    with failures():
        work = dist.all_to_all_single(output, data, take, give, async_op=True)
    received = torch.tensor(take, dtype=splits.dtype, device=splits.device)
    return Handle([work], lambda: (output, received))


def begin_reducescatter(tensor: torch.Tensor, op: Op, before: float = 1.0, after: float = 1.0) -> Handle:
    """Begin to reduce a tensor; each rank keeps its share of the rows, the first ones one more if they are uneven."""
    if op not in (Op.Average, Op.Sum):
        raise LoopError(f"hvd.reducescatter(op={op.name}): Average and Sum alone")
    size, rank = current().size, current().rank
    handle = begin_allreduce(_copy(tensor), op, before, after)
    share, more = divmod(len(tensor), size)
    first = rank * share + min(rank, more)

    def finish() -> torch.Tensor:
        whole: torch.Tensor = handle.result()
        return whole[first : first + share + (rank < more)].clone()

    return Handle([AsWork(handle)], finish)


def _rows(tensor: torch.Tensor) -> int:
    if not tensor.dim():
        raise LoopError("hvd.allgather() of a tensor without dimensions: give it one, tensor.unsqueeze(0)")
    return len(tensor)


def _of_all(number: int) -> list[int]:
    gathered = [torch.empty(1, dtype=torch.int64) for _ in range(current().size)]
    with failures():
        dist.all_gather(gathered, torch.tensor([number]))
    return [int(value) for value in gathered]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_sparse:
        raise refusal("sparse_allreduce_async")
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _flow(function: Any, *arguments: Any) -> Any:
    """`function.apply`, which torch has not typed."""
    return function.apply(*arguments)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        result: torch.Tensor = begin_allreduce(_copy(tensor), *how).result()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.how[0] not in (Op.Average, Op.Sum):
            raise LoopError(f"the gradient of hvd.allreduce(op={ctx.how[0].name}): Average and Sum alone have one")
        return _flow(_Allreduce, gradient, *ctx.how), None, None, None


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        rows = _of_all(_rows(tensor))
        ctx.first, ctx.rows = sum(rows[: current().rank]), len(tensor)
        result: torch.Tensor = begin_allgather(tensor).result()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # The average, as Horovod's: each rank's loss is a part of an average over the ranks.
        whole = begin_allreduce(_copy(gradient), Op.Average).result()
        return whole[ctx.first : ctx.first + ctx.rows]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
        ctx.root = root_rank
        result: torch.Tensor = begin_broadcast(_copy(tensor), root_rank).result()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        whole = begin_allreduce(_copy(gradient), Op.Average).result()
        return (whole if current().rank == ctx.root else torch.zeros_like(whole)), None


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: torch.Tensor | None) -> Any:
        rows, received = begin_alltoall(tensor, splits).result()
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        return begin_alltoall(gradient, ctx.received).result()[0], None


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        result: torch.Tensor = begin_reducescatter(tensor, *how).result()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        op, before, after = ctx.how
        factor = before * after * (current().size if op is Op.Sum else 1)
        return begin_allgather(gradient * factor).result(), None, None, None


# Horovod's functions. Those with an underscore at the end change their argument.


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    checked(process_set)
    return begin_allreduce(tensor, chosen(op, average), prescale_factor, postscale_factor)


def allreduce_async(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Handle:
    return allreduce_async_(_copy(tensor), *arguments, **options)


def allreduce_(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    return allreduce_async_(tensor, *arguments, **options).result()  # type: ignore[no-any-return]


def allreduce(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
              compression: Any = Compression.none, op: Op | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, process_set: Any = None) -> torch.Tensor:  # fmt: skip
    checked(process_set)
    small, context = compression.compress(tensor)
    reduced = _flow(_Allreduce, small, chosen(op, average), prescale_factor, postscale_factor)
    return compression.decompress(reduced, context)  # type: ignore[no-any-return]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> Handle:
    checked(process_set)
    return begin_allgather(tensor)


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    checked(process_set)
    current().check("allgather")
    return _flow(_Allgather, tensor)  # type: ignore[no-any-return]


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    checked(process_set)
    return begin_broadcast(tensor, root_rank)


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    return broadcast_async_(_copy(tensor), root_rank, name, process_set)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Any:
    return broadcast_async_(tensor, root_rank, name, process_set).result()


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    checked(process_set)
    return _flow(_Broadcast, tensor, root_rank)  # type: ignore[no-any-return]


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Handle:
    checked(process_set)
    return begin_alltoall(tensor, None if splits is None else torch.as_tensor(splits, dtype=torch.int32))


def alltoall(tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None) -> Any:
    checked(process_set)
    result = _flow(_Alltoall, tensor, None if splits is None else torch.as_tensor(splits, dtype=torch.int32))
    return result[0] if splits is None else result


def reducescatter_async(tensor: torch.Tensor, name: str | None = None, op: Op = Op.Average, process_set: Any = None,
                        prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> Handle:  # fmt: skip
    checked(process_set)
    return begin_reducescatter(tensor, chosen(op), prescale_factor, postscale_factor)


def reducescatter(tensor: torch.Tensor, name: str | None = None, compression: Any = Compression.none,
                  op: Op = Op.Average, process_set: Any = None, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> torch.Tensor:  # fmt: skip
    checked(process_set)
    small, context = compression.compress(tensor)
    reduced = _flow(_Reducescatter, small, chosen(op), prescale_factor, postscale_factor)
    return compression.decompress(reduced, context)  # type: ignore[no-any-return]


def barrier(process_set: Any = None) -> None:
    """Wait for all ranks."""
    checked(process_set)
    current().check("barrier")
    with failures():
        dist.barrier()


def _grouped(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def grouped(tensors: Tensors, *arguments: Any, **options: Any) -> Any:
        return [function(tensor, *arguments, **options) for tensor in tensors]

    grouped.__name__ = name
    return grouped


def _grouped_async(function: Callable[..., Handle], name: str) -> Callable[..., Handle]:
    @functools.wraps(function)
    def grouped(tensors: Tensors, *arguments: Any, **options: Any) -> Handle:
        return together([function(tensor, *arguments, **options) for tensor in tensors])

    grouped.__name__ = name
    return grouped


grouped_allreduce = _grouped(allreduce, "grouped_allreduce")
grouped_allgather = _grouped(allgather, "grouped_allgather")
grouped_reducescatter = _grouped(reducescatter, "grouped_reducescatter")
grouped_allreduce_async = _grouped_async(allreduce_async, "grouped_allreduce_async")
grouped_allreduce_async_ = _grouped_async(allreduce_async_, "grouped_allreduce_async_")
grouped_allgather_async = _grouped_async(allgather_async, "grouped_allgather_async")
grouped_reducescatter_async = _grouped_async(reducescatter_async, "grouped_reducescatter_async")


def grouped_allreduce_(tensors: Tensors, *arguments: Any, **options: Any) -> Any:
    """Reduce each tensor in place."""
    return grouped_allreduce_async_(tensors, *arguments, **options).result()
