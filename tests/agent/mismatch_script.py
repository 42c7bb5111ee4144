"""A session in which rank 1 does something else than the others, once, when a file says what."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import everstep


def collect(total: torch.Tensor, odd: str) -> None:
    match odd:
        case "other":
            dist.broadcast(total, src=0)
        case "size":
            dist.all_reduce(torch.zeros(20_000))
        case "lost":
            lose(total)
        case "skip":
            pass
        case "abort":
            os.abort()
        case _:
            dist.all_reduce(total)


def lose(total: torch.Tensor) -> None:
    """Begin a collective of which nothing ever leaves this process, as if the network had lost it."""
    group = dist.group.WORLD
    gloo = group._inner
    group._inner = type("Silent", (), {"allreduce": lambda *_: torch._C._distributed_c10d.Work()})()
    try:
        dist.all_reduce(total)
    finally:
        group._inner = gloo


if __name__ == "__main__":
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    with everstep.start() as run:
        model = DistributedDataParallel(torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        odd = ""
        if "EVALUATES" in os.environ:
            run.evaluate(lambda: odd != "skip evaluation" and dist.all_reduce(torch.zeros(10)), every=1)
        with (out / f"{os.getpid()}.jsonl").open("a", buffering=1) as diary:
            for step in run.steps(until=10**9):
                with step:
                    odd = ""
                    if dist.get_rank() == 1 and (out / "odd").exists():
                        odd = (out / "odd").read_text()
                        if odd == "lost" or not (out / "always").exists():
                            (out / "odd").unlink()
                    optimizer.zero_grad()
                    model(torch.ones(4, 8)).sum().backward()
                    collect(torch.zeros(10), odd)
                    optimizer.step()
                    time.sleep(0.02)
                if step.completed:
                    told = {"kind": "step", "step": run.step, "world": dist.get_world_size(), "at": time.monotonic()}
                    diary.write(json.dumps(told) + "\n")
