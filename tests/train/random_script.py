"""A training script in which everything draws: dropout, noise, augmentation by numpy and Python, generators of its own.

`random_script.py '{"out": …}'`: each process says what it drew in each step, and at the end what its parameters are.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

import everstep


@dataclass
class Wanted:
    """`die`: [rank, step, point] at which a process kills itself, once each; `seeded`: "alike", "by rank" or "not"."""

    out: str
    url: str | None = None
    until: int = 14
    every_steps: int | None = None
    die: list[list[Any]] = field(default_factory=list)
    seeded: str = "alike"
    rng: Any = True
    evaluate: bool = False  # draw between two steps as well


class Noisy(Dataset[Any]):
    """Samples that are read without a seed of their own."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> Any:
        x = torch.full((4,), index / 240) + 0.1 * torch.randn(4) + 0.1 * random.random()
        return x, x.sum().reshape(1) + 0.1 * float(np.random.random())


class Net(torch.nn.Module):
    """Dropout, a noise layer, and a branch that is dropped by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, keep: float) -> torch.Tensor:
        x = self.dropout(torch.tanh(self.a(x)))
        x = x + 0.1 * torch.randn_like(x) + keep * self.b(x)
        return self.c(x)


def seed(how: str) -> None:
    if how == "not":
        return
    value = 7 + (int(os.environ.get("RANK", "0")) if how == "by rank" else 0)
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = xxhash.xxh3_64()
    for tensor in tensors:
        found.update(tensor.detach().numpy().reshape(-1).data)
    return found.hexdigest()


def main(wanted: Wanted) -> None:
    torch.set_num_threads(1)
    seed(wanted.seeded)
    torch_own = torch.Generator()
    torch_own.manual_seed(5)
    numpy_own, python_own = np.random.default_rng(5), random.Random(5)

    def point(name: str, step: int) -> None:
        for rank, at, where in wanted.die:
            mark = Path(wanted.out) / f"died-{rank}-{at}-{where}"
            if (run.rank, step, name) == (rank, at, where) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    with everstep.start(wanted.url, every_steps=wanted.every_steps, rng=wanted.rng) as run:
        with torch.random.fork_rng():  # all ranks begin with the same parameters, however they are seeded
            torch.manual_seed(7)
            model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.track(model=model, optimizer=optimizer, torch_own=torch_own, numpy_own=numpy_own, python_own=python_own)
        loader = run.loader(Noisy(), global_batch=12, num_workers=1, seed_samples=False)
        with (Path(wanted.out) / f"{os.getpid()}.jsonl").open("a", buffering=1) as diary:
            for step in run.steps(loader, until=wanted.until):
                with step as batch:
                    drawn = {
                        "python": random.random(),
                        "numpy": float(np.random.standard_normal()),
                        "torch_own": float(torch.rand((), generator=torch_own)),
                        "numpy_own": float(numpy_own.random()),
                        "python_own": python_own.random(),
                        "shared": float(torch.rand((), generator=run.shared_rng)),
                        "torch": float(torch.randn(())),
                    }
                    x, y = batch.data
                    x = x + 0.1 * (drawn["python"] + drawn["numpy"] + drawn["numpy_own"] + drawn["python_own"])
                    loss = mse_loss(model(x, float(drawn["shared"] < 0.5)), y)
                    point("forward", step.number)
                    batch.scale(loss).backward()
                    for p in model.parameters():  # DDP adds up in another order after a recovery
                        dist.all_reduce(p.grad)
                        p.grad /= run.world_size
                    point("backward", step.number)
                    optimizer.step()
                    optimizer.zero_grad()
                    point("tail", step.number)
                    time.sleep(0.005)
                if step.completed:
                    told: dict[str, Any] = {
                        "step": step.number,
                        "rank": run.rank,
                        "world": run.world_size,
                        "at": time.monotonic(),
                    }
                    drawn["batch"] = digest([x, y])
                    told |= {"at": time.monotonic(), "drawn": drawn, "parameters": digest(model.parameters())}
                    diary.write(json.dumps({"kind": "step", **told}) + "\n")
                if wanted.evaluate:
                    _ = torch.rand(100 * step.number), np.random.random(17), random.random(), torch_own.seed()
                point("between", step.number)
            moments = (t for state in optimizer.state.values() for t in state.values())
            found = digest([*model.parameters(), *moments])
            after = [random.random(), float(np.random.random()), float(torch.rand(()))]
            diary.write(json.dumps({"kind": "end", "rank": run.rank, "parameters": found, "after": after}))


if __name__ == "__main__":
    main(Wanted(**json.loads(sys.argv[1])))
