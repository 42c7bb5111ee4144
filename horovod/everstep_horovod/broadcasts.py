"""Sends parameters, an optimizer's state or an object of one rank to all others. Objects are pickled, as by Horovod."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from everstep.recovery.errors import LoopError
from everstep_horovod.collectives import begin_broadcast, checked
from everstep_horovod.handles import failures
from everstep_horovod.world import current


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Give all ranks, in place, the tensors of `root_rank`: `model.state_dict()`, `model.named_parameters()` or
    `model.parameters()`."""
    for handle in [begin_broadcast(tensor, root_rank) for tensor in _tensors(params)]:
        handle.result()


def _tensors(params: Any) -> list[torch.Tensor]:
    named: Iterable[Any] = sorted(params.items()) if isinstance(params, Mapping) else params
    tensors = [item[1] if isinstance(item, tuple) else item for item in named]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise LoopError(f"hvd.broadcast_parameters(): a {type(tensor).__name__} is no tensor; use broadcast_object")
    return tensors


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None) -> None:
    """Give all ranks the state and the settings of the optimizer of `root_rank`."""
    tensors: list[torch.Tensor] = []
    mine = current().rank == root_rank
    described = broadcast_object(_apart(optimizer.state_dict(), tensors) if mine else None, root_rank)
    if not mine:
        state = _whole(described, tensors)
    for handle in [begin_broadcast(tensor, root_rank) for tensor in tensors]:
        handle.result()
    if not mine:
        optimizer.load_state_dict(state)


class _Placeholder:
    """Stands for a tensor, which is sent separately."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device.type


def _apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with placeholders for its tensors, which are added to the list."""
    match value:
        case torch.Tensor():
            tensors.append(value)
            return _Placeholder(value)
        case dict():
            return {key: _apart(item, tensors) for key, item in value.items()}
        case list():
            return [_apart(item, tensors) for item in value]
    return value


def _whole(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with new, empty tensors for its placeholders. They are added to the list."""
    match value:
        case _Placeholder():
            tensors.append(torch.empty(value.shape, dtype=value.dtype, device=value.device))
            return tensors[-1]
        case dict():
            return {key: _whole(item, tensors) for key, item in value.items()}
        case list():
            return [_whole(item, tensors) for item in value]
    return value


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> Any:
    """The object of `root_rank`, on all ranks."""
    checked(process_set)
    current().check("broadcast_object")
    objects = [obj]
    with failures():
        dist.broadcast_object_list(objects, root_rank)
    return objects[0]


def broadcast_object_fn(root_rank: int = 0, name: str | None = None, process_set: Any = None) -> Any:
    """`broadcast_object` with these arguments, as a function of the object."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """The objects of all ranks, by rank."""
    checked(process_set)
    current().check("allgather_object")
    objects: list[Any] = [None] * current().size
    with failures():
        dist.all_gather_object(objects, obj)
    return objects
