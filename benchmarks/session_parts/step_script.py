"""A training process of `benchmarks/session.py`: the same steps under torchrun without Everstep, or in the session.

    step_script.py plain|session|plain-model|session-model MILLISECONDS STEPS OUT

A step is a forward and a backward pass of a small network under DDP, AdamW and a schedule, and then a wait until it has
taken MILLISECONDS, as for an accelerator that computes. With "-model" the two processes are one replica, not
two: each has a network of its own, and their outputs are summed. Rank 0 writes the seconds of each step to OUT.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 32  # a rank


class Sum(torch.autograd.Function):
    """Of what the ranks of a replica have computed."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


summed: Any = Sum.apply


def main() -> None:
    kind, milliseconds, steps, out = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    divided = kind.endswith("-model")
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

    if kind.startswith("plain"):
        dist.init_process_group("gloo")
        model = net if divided else DistributedDataParallel(net)
        optimizer, schedule = parts(model)
        sampler: Any = None if divided else DistributedSampler(data)
        for x, y in islice(DataLoader(data, batch_size=BATCH, sampler=sampler), steps):
            forward = (lambda x: summed(net(x), None)) if divided else model
            train(forward, optimizer, schedule, x, y, lambda loss: loss)
            ends.append(time.perf_counter())
        rank = dist.get_rank()
        dist.destroy_process_group()
    else:
        import everstep  # noqa: PLC0415  not in the plain process

        with everstep.start(str(out.with_name("store")), every_steps=10**6) as run:
            replica = run.mesh(model=2).get_group("model") if divided else None
            model = net if divided else DistributedDataParallel(net)
            forward = (lambda x: summed(net(x), replica)) if divided else model
            optimizer, schedule = parts(model)
            run.track(model=model, optimizer=optimizer, schedule=schedule, seen={"samples": 0})
            for step in run.steps(run.loader(data, global_batch=(1 if divided else 2) * BATCH), until=steps):
                with step as batch:
                    loss = train(forward, optimizer, schedule, *batch.data, batch.scale)
                    run.log(loss=loss)
                ends.append(time.perf_counter())
            rank = run.rank
    if rank == 0:
        out.write_text(json.dumps([after - before for before, after in pairwise(ends)]))


main()
