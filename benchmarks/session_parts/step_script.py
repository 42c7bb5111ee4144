"""A training process of `benchmarks/session.py`: the same steps under torchrun without Everstep, or in the session.

    step_script.py plain|session MILLISECONDS STEPS OUT

A step is a forward and a backward pass of a small network under DDP, AdamW and a schedule, and then a wait until it has
taken MILLISECONDS, as for an accelerator that computes. Rank 0 writes the seconds of each step to OUT.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 32  # a rank


def main() -> None:
    kind, milliseconds, steps, out = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(BATCH * 2 * steps, 64), torch.randn(BATCH * 2 * steps, 1))
    layers = [torch.nn.Linear(64, 64) if i % 2 == 0 else torch.nn.ReLU() for i in range(16)]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))
    ends: list[float] = []

    def train(model: Any, optimizer: Any, schedule: Any, x: Any, y: Any, scale: Any) -> Any:
        began = time.perf_counter()
        loss = torch.nn.functional.mse_loss(model(x), y)
        scale(loss).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        time.sleep(max(0.0, milliseconds / 1000 - (time.perf_counter() - began)))
        return loss

    def parts(model: Any) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(model.parameters())
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1000)

    if kind == "plain":
        dist.init_process_group("gloo")
        model = DistributedDataParallel(net)
        optimizer, schedule = parts(model)
        sampler: Any = DistributedSampler(data)
        for x, y in DataLoader(data, batch_size=BATCH, sampler=sampler):
            train(model, optimizer, schedule, x, y, lambda loss: loss)
            ends.append(time.perf_counter())
        rank = dist.get_rank()
        dist.destroy_process_group()
    else:
        import everstep  # noqa: PLC0415  not in the plain process

        with everstep.start(str(out.with_name("store")), every_steps=10**6) as run:
            model = DistributedDataParallel(net)
            optimizer, schedule = parts(model)
            run.track(model=model, optimizer=optimizer, schedule=schedule, seen={"samples": 0})
            for step in run.steps(run.loader(data, global_batch=2 * BATCH), until=steps):
                with step as batch:
                    loss = train(model, optimizer, schedule, *batch.data, batch.scale)
                    run.log(loss=loss)
                ends.append(time.perf_counter())
            rank = run.rank
    if rank == 0:
        out.write_text(json.dumps([after - before for before, after in pairwise(ends)]))


main()
