"""A session whose loop is left by `break`; rank 1 is killed once behind the loop, before the run is closed.

`leaves_script.py OUT URL`: the file OUT/die asks for the kill.
"""

import logging
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import everstep

if __name__ == "__main__":
    out, url = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.basicConfig(level=logging.INFO)
    with everstep.start(url, every_steps=5) as run:
        model = DistributedDataParallel(torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(until=40):
            with step:
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step.number + dist.get_rank()))
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            if step.completed and run.step == 12:
                break
        if dist.get_rank() == 1 and (out / "die").exists():
            (out / "die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"ended at {run.step} with {model.module.weight.double().sum().item()!r}", flush=True)
