"""Runs a script, and says for each process how many bytes its own collectives were given, and how many backward passes
it made: `bytes_sent.py SCRIPT …`.

Collectives that the session makes for itself do not count.
"""

import atexit
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

script = os.path.abspath(sys.argv[1])
given, passes = [0], [0]


def counted(collective: Callable[..., Any], place: int) -> Callable[..., Any]:
    """`place`: of the tensor that this rank gives, among the arguments."""

    def counting(*args: Any, **kwargs: Any) -> Any:
        if os.path.abspath(sys._getframe(1).f_code.co_filename) == script:
            given[0] += args[place].nbytes
        return collective(*args, **kwargs)

    return counting


backward = torch.autograd.backward


def counting_backward(*args: Any, **kwargs: Any) -> None:
    passes[0] += 1
    backward(*args, **kwargs)


dist.all_reduce = counted(dist.all_reduce, 0)
dist.all_gather = counted(dist.all_gather, 1)
torch.autograd.backward = counting_backward  # Tensor.backward is called twice where functions are watched
atexit.register(lambda: print(f"sent {given[0]} bytes for {passes[0]} backward passes", flush=True))
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
