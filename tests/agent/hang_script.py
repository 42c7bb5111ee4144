"""A session that hangs once, in rank 1, when a file says so: in a sleep, while the others wait in a collective."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import everstep


def stuck() -> None:
    time.sleep(10_000)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    with everstep.start() as run:
        model = DistributedDataParallel(torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        with (out / f"{os.getpid()}.jsonl").open("a", buffering=1) as diary:
            for step in run.steps(until=10**9):
                with step:
                    if dist.get_rank() == 1 and (out / "hang").exists():
                        (out / "hang").replace(out / f"hangs-{os.getpid()}")
                        stuck()
                    optimizer.zero_grad()
                    model(torch.ones(4, 8)).sum().backward()
                    optimizer.step()
                    time.sleep(0.02)
                if step.completed:
                    told = {"kind": "step", "step": run.step, "world": dist.get_world_size(), "at": time.monotonic()}
                    diary.write(json.dumps(told) + "\n")
