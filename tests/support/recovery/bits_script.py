"""A training script with what is rare in DDP: several modules in a tracked one, a communication hook, two types,
frozen layers, layers that are used in another order than they are registered in, and some that a step leaves out.

It says after each step what its parameters are.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy, relu
from torch.nn.parallel import DistributedDataParallel

from support.recovery.recovery_script import Diary, Points, Wanted, become_a_script, digest, start

FEATURES, WIDTH = 64, 48


class Encoder(torch.nn.Module):
    """`unused`: every other step leaves a layer out."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.last = torch.nn.Linear(WIDTH, WIDTH)
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.wide = torch.nn.Linear(WIDTH, WIDTH).double()
        self.first = torch.nn.Linear(FEATURES, WIDTH)
        self.unused = unused

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        x = relu(self.frozen(self.first(x)))
        if not self.unused or number % 2:
            x = relu(self.wide(x.double()).float())
        return relu(self.last(x))


class Model(torch.nn.Module):
    """Two heads that nobody can tell apart by their parameters, one with a hook, and one view of its buckets."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"bucket_cap_mb": 0.004, "find_unused_parameters": unused}
        self.encoder = DistributedDataParallel(Encoder(unused), **options)
        self.left, self.right = (
            DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 2)), **o)
            for o in (options, options | {"gradient_as_bucket_view": True})
        )
        self.left.register_comm_hook(None, allreduce_hook)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        x = self.encoder(x, number)
        found: torch.Tensor = self.left(x) + self.right(x)
        return found


def main(wanted: Wanted, environ: dict[str, str]) -> None:
    """In a forked process."""
    become_a_script(wanted.out, environ)
    torch.set_num_threads(1)
    diary = Diary(wanted.out)
    with start(wanted) as run:
        torch.manual_seed(1)
        model = Model(bool(wanted.ddp.get("find_unused_parameters")))
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
        loader = run.loader(Points(), global_batch=wanted.global_batch)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(loader, until=wanted.steps):
            with step as batch:
                while step.number == wanted.hold_at and not os.path.exists(f"{wanted.out}/go"):
                    time.sleep(0.01)
                x, y = batch.data
                optimizer.zero_grad()
                batch.scale(cross_entropy(model(x, step.number), y)).backward()
                optimizer.step()
            if step.completed:
                diary.write(kind="step", step=run.step, digest=digest(model, optimizer))
        diary.write(kind="end", step=run.step, digest=digest(model, optimizer))
