"""A training script as people write them: DDP, mixed precision, accumulation, BatchNorm, dropout, loader workers,
clipping, a schedule, and collectives of its own before and after the optimizer.

It says after each step what its parameters are.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.nn.functional import cross_entropy, relu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import everstep
from support.recovery.held_store import held_checkpointer

SAMPLES = 4096
FEATURES = 64


@dataclass
class Wanted:
    """`steps` to take, state of about 4 × `width`² × 12 bytes, and what to leave out."""

    steps: int = 10**9
    width: int = 64
    url: str | None = None
    every_steps: int | None = None
    workers: int = 2
    micro_batch: int | None = 4
    global_batch: int = 24
    collectives: bool = True
    scaler: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)
    out: str = ""  # a folder for what each process says
    seen: bool = False  # say which samples a step took
    pause: float = 0.0
    slow_rank: int = -1  # pauses five times as long
    slow_input: float = 0.0  # seconds that this rank needs more for each sample that it reads
    plain: bool = False  # nothing that depends on how a batch is cut: no BatchNorm, dropout or mixed precision
    bug_at: int = -1  # this step raises an error of the script's own
    hold: str = ""  # the file that holds calls of the store; see held_store
    slow_from: int = -1  # from this step on a step takes half a second more, until the file `go` is in `out`
    hold_at: int = -1  # this step goes on when that file is there


class Points(Dataset[Any]):
    """Points and the side of a plane that they lie on, made from their number. Reading one takes
    `slow_rank` so many seconds."""

    def __init__(self, slow_rank: int = -1, seconds: float = 0.0) -> None:
        self._slow_rank, self._seconds = str(slow_rank), seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if os.environ.get("RANK") == self._slow_rank:
            time.sleep(self._seconds)
        x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        return x, int(x[:8].sum() > 0)


class Net(torch.nn.Module):
    """Two hidden layers with BatchNorm, and dropout."""

    def __init__(self, width: int, plain: bool) -> None:
        super().__init__()
        self.a = torch.nn.Linear(FEATURES, width)
        self.b = torch.nn.Linear(width, width)
        self.c = torch.nn.Linear(width, 2)
        norm = torch.nn.LayerNorm if plain else torch.nn.BatchNorm1d
        self.norm_a, self.norm_b = norm(width), norm(width)
        self.dropout = torch.nn.Dropout(0 if plain else 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.c(self.dropout(relu(self.norm_b(self.b(relu(self.norm_a(self.a(x))))))))
        return y


class Diary:
    """What this process says: one JSON line an event."""

    def __init__(self, folder: str) -> None:
        self._file = open(f"{folder}/{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115  as long as the process

    def write(self, **event: Any) -> None:
        self._file.write(json.dumps({"at": time.monotonic(), **event}) + "\n")


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = xxhash.xxh3_64()
    for p in model.parameters():
        found.update(p.detach().numpy().data)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                found.update(value.detach().contiguous().numpy().reshape(-1).data)
    return found.hexdigest()


def leave_time(wanted: Any, number: int) -> None:
    """A test that has something to do before the last step is not to depend on how fast steps are."""
    if 0 <= wanted.slow_from <= number and not os.path.exists(f"{wanted.out}/go"):
        time.sleep(0.5)


def start(wanted: Wanted) -> Any:
    """The session's run, over a store that can be held if that is wanted."""
    if wanted.hold:
        return everstep.start(held_checkpointer(str(wanted.url), wanted.hold, every_steps=wanted.every_steps))
    return everstep.start(wanted.url, every_steps=wanted.every_steps)


def train(wanted: Wanted) -> None:
    torch.set_num_threads(1)
    diary = Diary(wanted.out)
    with start(wanted) as run:
        torch.manual_seed(1)
        model = DistributedDataParallel(Net(wanted.width, wanted.plain), **wanted.ddp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
        scaler = torch.amp.GradScaler("cpu", enabled=wanted.scaler)
        loader = run.loader(
            Points(wanted.slow_rank, wanted.slow_input),
            global_batch=wanted.global_batch,
            micro_batch=wanted.micro_batch,
            num_workers=wanted.workers,
        )
        run.track(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
        diary.write(kind="begin")
        began = False
        for step in run.steps(loader, until=wanted.steps):
            if not began:
                began = True
                diary.write(kind="from", step=run.step, digest=digest(model, optimizer))
            leave_time(wanted, step.number)
            with step as batches:
                while step.number == wanted.hold_at and not os.path.exists(f"{wanted.out}/go"):
                    time.sleep(0.01)
                optimizer.zero_grad(set_to_none=True)
                total, taken = torch.zeros(1), []
                for batch in batches if wanted.micro_batch else [batches]:
                    x, y = batch.data
                    if wanted.seen:
                        taken += batch.indices.tolist()
                    with contextlib.nullcontext() if batch.last else model.no_sync():
                        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not wanted.plain):
                            loss = batch.scale(cross_entropy(model(x), y))
                        scaler.scale(loss).backward()
                    total += loss.detach()
                    time.sleep(wanted.pause * (5 if run.rank == wanted.slow_rank else 1))
                if step.number == wanted.bug_at:
                    raise RuntimeError("a mistake in the script")
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if wanted.collectives and step.number % 2:
                    dist.all_reduce(total)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                if wanted.collectives:
                    if not step.number % 2:
                        dist.all_reduce(total)
                    dist.all_reduce(total, async_op=True).wait()
            if step.completed:
                told = {"seen": taken} if wanted.seen else {}
                diary.write(
                    kind="step", step=run.step, digest=digest(model, optimizer), lr=scheduler.get_last_lr()[0],
                    rank=run.rank, world=run.world_size, **told,
                )  # fmt: skip
            else:
                diary.write(kind="again", step=step.number)
        first = [float(p.detach().reshape(-1)[0]) for p in model.parameters()]
        diary.write(kind="end", step=run.step, digest=digest(model, optimizer), first=first)


def become_a_script(out: str, environ: dict[str, str]) -> None:
    """Make a forked process look like one that a launcher started: its variables, arguments, and a log in `out`."""
    os.environ.update(environ)
    log = os.open(f"{out}/{os.getpid()}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import faulthandler  # noqa: PLC0415
    import logging  # noqa: PLC0415
    import signal  # noqa: PLC0415

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s %(message)s", datefmt="%H:%M:%S")
    sys.argv = ["train.py"]


def main(wanted: Wanted, environ: dict[str, str]) -> None:
    """In a forked process."""
    become_a_script(wanted.out, environ)
    train(wanted)
