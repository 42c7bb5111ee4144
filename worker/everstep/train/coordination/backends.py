"""Which torch.distributed backend carries the collectives: chosen by device, or by EVERSTEP_BACKEND.

Pure but for asking torch what it was built with. Invariant: a backend that this build of torch lacks, or that cannot
be used here, is refused by name, and never replaced by another one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from everstep.contract import env
from everstep.recovery.errors import LoopError

RECOVERABLE = {"cpu": "gloo", "cuda": "nccl"}  # those whose collectives can be given up in process


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
