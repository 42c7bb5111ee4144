"""A session whose parameters are the same bits at any number of ranks, and that can be struck at any of its phases.

All gradients are sums of small multiples of 1/64, which are exact in any order; they depend on the parameters and on
every sample of the batch. So an undisturbed run's parameters, in a world of one, are what any disturbed run must have.

`phase_script.py '{"out": …}'`
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import everstep
from everstep.data import ElasticLoader

SAMPLES = 4096
FEATURES = 64
ROWS = 4200  # so many that the parameters, and both of Adam's moments, are messages of their own
BATCH = 24
GRAIN = 64.0


@dataclass
class Wanted:
    """`steps` to take, of at least `pause` seconds."""

    out: str
    steps: int = 10**9
    url: str | None = None
    every_steps: int | None = None
    pause: float = 0.05


class Points(Dataset[Any]):
    """Whole numbers, the side of a plane that they lie on, and the sample's own number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = torch.randint(-3, 4, (FEATURES,), generator=torch.Generator().manual_seed(index)).float()
        return x, float(x[:8].sum() > 0), float(index + 1)


class Exact(torch.nn.Module):
    """A classifier that learns from errors rounded to 1/64, a sum of the numbers, and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(FEATURES))
        self.wide = torch.nn.Parameter(torch.zeros(ROWS, FEATURES))
        self.tally = torch.nn.Parameter(torch.zeros(1))
        self.calls: torch.Tensor
        self.factors: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("factors", (torch.arange(ROWS) % 7 - 3).float(), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """The loss of these samples, summed."""
        self.calls += 1
        with torch.no_grad():
            weights = self.a.double() + self.wide[0].double()
            error = ((torch.sigmoid((x.double() * weights).sum(1)) - y) * GRAIN).round().float() / GRAIN
        wide = (x @ self.wide.t()) @ self.factors
        return (error * (x @ self.a)).sum() + (error * wide).sum() + (number * self.tally).sum()


def make() -> tuple[Exact, torch.optim.Optimizer, Any]:
    model = Exact()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> str:
    """Of the parameters, buffers, the optimizer's state and the schedule."""
    found = xxhash.xxh3_64()
    for value in model.state_dict().values():
        found.update(value.detach().contiguous().numpy().reshape(-1))
    for state in optimizer.state.values():
        for value in state.values():
            found.update(value.detach().contiguous().numpy().reshape(-1))
    found.update(repr((scheduler.last_epoch, scheduler.get_last_lr())).encode())
    return found.hexdigest()


def undisturbed() -> Iterator[str]:
    """The digest before the first step, and after each; without a session and without DDP."""
    torch.set_num_threads(1)
    model, optimizer, scheduler = make()
    loader = ElasticLoader(Points(), global_batch=BATCH, rank=0, world_size=1)
    yield digest(model, optimizer, scheduler)
    while True:
        for batch in loader:
            optimizer.zero_grad(set_to_none=True)
            model(*(t.float() for t in batch.data)).backward()
            optimizer.step()
            scheduler.step()
            yield digest(model, optimizer, scheduler)


def train(wanted: Wanted) -> None:
    from support.agent.phases import aimed_checkpointer, arm  # noqa: PLC0415  beside this script
    from support.recovery.recovery_script import Diary  # noqa: PLC0415

    torch.set_num_threads(1)
    diary = Diary(wanted.out)
    points = arm(Path(wanted.out))
    store = aimed_checkpointer(wanted.url, points, every_steps=wanted.every_steps) if wanted.url else None
    with everstep.start(store) as run:
        inner, optimizer, scheduler = make()
        model = DistributedDataParallel(inner)
        loader = run.loader(Points(), global_batch=BATCH)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        optimizer.register_step_pre_hook(lambda *_: points.at("optimizer"))
        optimizer.register_step_post_hook(lambda *_: points.at("tail"))
        diary.write(kind="begin")
        began = False
        for step in run.steps(loader, until=wanted.steps):
            if not began:
                began = True
                diary.write(kind="from", step=run.step, digest=digest(inner, optimizer, scheduler))
            with step as batch:
                optimizer.zero_grad(set_to_none=True)
                # A sum, and no mean over the rows: the batch's weight is asked, and must not be used.
                assert batch.weight > 0
                # DDP divides by the number of ranks.
                (model(*(t.float() for t in batch.data)) * run.world_size).backward()
                optimizer.step()
                scheduler.step()
                time.sleep(wanted.pause)
            if step.completed:
                points.new = False
                diary.write(
                    kind="step", step=run.step, digest=digest(inner, optimizer, scheduler), rank=run.rank,
                    world=run.world_size, round=points.round,
                )  # fmt: skip
            else:
                diary.write(kind="again", step=step.number)
        diary.write(kind="end", step=run.step, digest=digest(inner, optimizer, scheduler))


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s.%(msecs)03d {os.getpid()} %(name)s %(message)s")
    train(Wanted(**json.loads(sys.argv[1])))
