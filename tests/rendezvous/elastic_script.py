"""A training script that knows nothing of us: all-reduces until a file `stop` appears. Run by torchrun in the tests.

    elastic_script.py FOLDER

Each process writes one line a world that it was in, at its first all-reduce: seconds, agent's pid, restart, rank, world
size, sum, round. A process that sees `fail-RANK` in the folder ends with an error.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    first = True
    while True:
        total = torch.ones(1)
        dist.all_reduce(total)
        if first:
            restart, told = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["EVERSTEP_ROUND"]
            words = (time.time(), os.getppid(), restart, rank, world, int(total), told)
            with (folder / "worlds").open("a") as out:
                out.write(" ".join(map(str, words)) + "\n")
            first = False
        stop = torch.tensor([float((folder / "stop").exists())])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            break
        fail = folder / f"fail-{rank}"
        if fail.exists():
            fail.unlink()
            sys.exit("told to fail")
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
