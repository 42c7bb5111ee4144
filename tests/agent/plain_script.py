"""A script that never calls us: DDP, its own checkpoint in a file, and what torchrun gives it.

It writes one line a step: pid, rank, world size, step, a digest of the parameters, and when.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--fail-at", type=int, default=-1, help="rank 1 raises after this step, each time")
    parser.add_argument("--fail-once-at", type=int, default=-1)
    parser.add_argument("--wait-at", type=int, default=-1, help="after this step, for the file `go`")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved = asked.out / "checkpoint.pt"
    step = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        step = state["step"]
    with (asked.out / f"{os.getpid()}.steps").open("a", buffering=1) as diary:
        while step < asked.steps:
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 64 + rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            step += 1
            if rank == 0:
                torch.save({"model": model.state_dict(), "step": step}, saved.with_suffix(".new"))
                saved.with_suffix(".new").rename(saved)
            total = sum(float(p.detach().double().sum()) for p in model.parameters())
            restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
            diary.write(f"{os.getpid()} {rank} {world} {step} {total!r} {time.monotonic()} {restart}\n")
            if rank == 1 and 0 <= asked.fail_at <= step:
                raise ValueError("no such luck")
            once = asked.out / "failed"
            if rank == 1 and step == asked.fail_once_at and not once.exists():
                once.touch()
                raise ValueError("no such luck, once")
            while step == asked.wait_at and not (asked.out / "go").exists():
                time.sleep(0.01)
            time.sleep(asked.pause)
    dist.destroy_process_group()
