"""Finds this process's rank and device, and forms the process group under a launcher.

The same script runs alone and under a launcher: the environment variables of torchrun and other launchers decide, and
EVERSTEP_BACKEND. Invariant: a backend that this build of torch lacks, or that cannot be used here, is refused by name,
and never replaced by another one.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from everstep.contract import env
from everstep.recovery.errors import LoopError
from everstep.train.coordination.group_shutdown import hold_group, quiesce

RECOVERABLE = {"cpu": "gloo", "cuda": "nccl"}  # those whose collectives can be given up in process


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """This process's place among its peers. `made`: we made the process group, and must destroy it. `sizes`: the
    numbers of processes that the job may have."""

    rank: int
    world_size: int
    device: torch.device
    made: bool
    sizes: range

    @property
    def most(self) -> int:
        """The most processes that the job may come to have."""
        return self.sizes[-1]


def most_processes(environ: Mapping[str, str] = os.environ) -> int:
    """The numbers of processes that the job may have, from the agent."""
    return env.whole_number(environ, env.MOST_PROCESSES, 1, low=1)


def _sizes(size: int, environ: Mapping[str, str]) -> range:
    """The sizes of the worlds that the job may have; all agents have the same number of processes."""
    most = max(size, most_processes(environ))
    least = min(most, env.whole_number(environ, env.LEAST_PROCESSES, most, low=1))
    return range(most, least - 1, -int(environ.get("LOCAL_WORLD_SIZE", "1")))[::-1]


def take_place() -> ProcessPlace:
    """Find this process's place. Under a launcher, also form the default process group if the script has not: gloo for
    CPU tensors, NCCL for those of a GPU."""
    atexit.register(quiesce)  # first, so that it runs after all functions that are registered from now on
    environ, device = os.environ, torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    made = False
    backend = backend_for(device, environ, recovers=env.AGENT_SOCKET in environ) if dist.is_available() else ""
    if "RANK" in environ and dist.is_available() and not dist.is_initialized():
        dist.init_process_group(backend)
        made = True
    if dist.is_available() and dist.is_initialized():
        hold_group()
        size = dist.get_world_size()
        return ProcessPlace(dist.get_rank(), size, device, made, _sizes(size, environ))
    return ProcessPlace(0, 1, device, made, range(1, 2))


def backend_for(device: torch.device, environ: Mapping[str, str], *, recovers: bool) -> str:
    """The backend of the default process group: `gloo`, or `cpu:gloo,cuda:nccl` where there is an accelerator.
    `recovers`: under everstep-run. Raises `LoopError` for an override that cannot be."""
    standard = dist.get_default_backend_for_device(device)
    default = standard if device.type == "cpu" else f"cpu:gloo,{device.type}:{standard}"
    requested = environ.get(env.BACKEND, "").strip().lower()
    if not requested:
        return default
    parts = [part.rpartition(":") for part in requested.split(",")]
    for kind, _, name in parts:
        if not dist.is_backend_available(name):
            known = ", ".join(n for n in dist.Backend.backend_list if n != "undefined" and dist.is_backend_available(n))
            raise LoopError(
                f"{env.BACKEND}={requested}: this build of torch has no backend {name!r}; it has {known}. Use an image "
                "whose torch was built with it, or take the variable out"
            )
        kinds = [kind] if kind else ["cpu", *([device.type] if device.type != "cpu" else [])]
        if recovers and any(RECOVERABLE.get(device_kind) != name for device_kind in kinds):
            raise LoopError(
                f"{env.BACKEND}={requested}: under everstep-run the session recovers in process, which gloo (CPU) and "
                "NCCL (GPU) alone can do. Start this job with torchrun (rendezvous.backend c10d), or take the variable "
                "out"
            )
    return requested
