"""Runs a script, and says how many bytes of gradients DDP has averaged on each rank, and in how many buckets:
`bytes_averaged.py SCRIPT …`.

`EVERSTEP_TEST_ALWAYS=1` takes the script's `no_sync` away, so that gradients travel in each backward pass.
"""

import atexit
import contextlib
import os
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

averaged, buckets = [0], [0]


def counting(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    del state
    averaged[0] += bucket.buffer().nbytes
    buckets[0] += 1
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]


class Counted(DistributedDataParallel):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(None, counting)

    def no_sync(self) -> Any:
        return contextlib.nullcontext() if os.environ.get("EVERSTEP_TEST_ALWAYS") else super().no_sync()


torch.nn.parallel.DistributedDataParallel = Counted  # type: ignore[misc]
atexit.register(lambda: print(f"averaged {averaged[0]} bytes in {buckets[0]} buckets", flush=True))
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
