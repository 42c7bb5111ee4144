"""Process groups that are made in Python, and c10d's tables of groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from everstep.torch_private.patches import replace

_Gloo: Any = dist.ProcessGroupGloo


def allgather_options() -> Any:
    """The options of a gather that was given none. The others' are public."""
    return torch._C._distributed_c10d.AllgatherOptions()


def gloo_device(**where: str) -> Any:
    """A device that listens on `hostname=` or `interface=`; without either, on gloo's default."""
    return _Gloo.create_device(**where) if where else _Gloo.create_default_device()


def gloo(store: Any, rank: int, size: int, device: Any, *, threads: int, timeout: timedelta) -> Any:
    """A group of gloo's own on one device. Waits for the other members."""
    options = _Gloo._Options()
    options._devices, options._threads, options._timeout = [device], threads, timeout
    return _Gloo(store, rank, size, options)


def nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group of NCCL's own. UNPROVEN: untested on GPUs."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def of_backends(store: Any, rank: int, size: int, backends: Mapping[str, tuple[Any, Any]]) -> Any:
    """One group over several: for each type of device its kind of backend, and the group of that kind."""
    both: Any = dist.ProcessGroup(store, rank, size)
    for device, (kind, backend) in backends.items():
        both._register_backend(torch.device(device), kind, backend)
    return both


def set_ranks(group: Any, ranks: Mapping[int, int]) -> None:
    """Write into c10d's table which rank of the world has which rank of the group."""
    distributed_c10d._world.pg_group_ranks[group] = dict(ranks)


def collectives_begun(group: Any) -> int:
    """How many collectives the group has begun. Raises `RuntimeError` if its backend does not count them."""
    return int(group._get_sequence_number_for_group())


def default_store() -> Any:
    """The store by which the default group was made."""
    return distributed_c10d._get_default_store()


def replace_new_group(make: Callable[[Any], Any]) -> None:
    """Replace the function to which all of torch's ways to make a group come, by `make` of it."""
    replace("_new_group_with_tag", make, distributed_c10d)


def rpc_entries() -> list[tuple[Any, str]]:
    """The functions of torch's RPC that a script calls, and the inner function: a script may have imported them
    before. Each as the module that holds it, and its name."""
    if not dist.rpc.is_available():
        return []
    return [(dist.rpc, "init_rpc"), (dist.rpc.backend_registry, "construct_rpc_backend_options"),
            (dist.rpc, "_init_rpc_backend")]  # fmt: skip
