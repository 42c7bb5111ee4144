"""`import everstep_horovod.torch as hvd`: the functions of `horovod.torch`."""

from __future__ import annotations

import os
from typing import NoReturn

import torch.distributed as _dist

from everstep_horovod.broadcasts import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from everstep_horovod.collectives import (
    Op,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    global_process_set,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from everstep_horovod.compression import Compression
from everstep_horovod.errors import INSTEAD, HorovodInternalError, HostsUpdatedInterrupt, refusal
from everstep_horovod.handles import poll, synchronize
from everstep_horovod.optimizer import DistributedOptimizer
from everstep_horovod.torch import elastic
from everstep_horovod.world import current, init, is_initialized, shutdown

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "synchronize",
]

Average, Sum, Adasum, Min, Max, Product = Op.Average, Op.Sum, Op.Adasum, Op.Min, Op.Max, Op.Product


def rank() -> int:
    """This process's rank in the present world."""
    return current().rank


def size() -> int:
    """The number of processes in the present world."""
    return current().size


def local_rank() -> int:
    """This process's rank among those of its agent."""
    current()
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    """The number of processes of this agent."""
    current()
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cross_rank() -> int:
    """The rank of this agent among all agents."""
    current()
    return int(os.environ.get("GROUP_RANK", "0"))


def cross_size() -> int:
    """The number of agents."""
    current()
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def is_homogeneous() -> bool:
    """All agents have the same number of processes."""
    return True


def gloo_built() -> bool:
    return _dist.is_gloo_available()


def gloo_enabled() -> bool:
    return _dist.is_gloo_available()


def nccl_built() -> bool:
    return _dist.is_nccl_available()


def cuda_built() -> bool:
    return _dist.is_nccl_available()


def mpi_built() -> bool:
    return False


def mpi_enabled() -> bool:
    return False


def mpi_threads_supported() -> bool:
    return False


def ccl_built() -> bool:
    return False


def ddl_built() -> bool:
    return False


def rocm_built() -> bool:
    return False


def __getattr__(name: str) -> NoReturn:
    if name in INSTEAD:
        raise refusal(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
