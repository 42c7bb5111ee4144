"""The script of the recovery benchmark, with and without the session: DDP on a small net, one line a step.

    train.py OUT [--session]

PID.steps has a line a step: pid, rank, world size, completed steps, a checksum of the parameters, seconds of the
monotonic clock. PID.rounds has one for each world that the process came to train in: when it began to come to it (it
was started, or heard of the round), when its process group had formed, when it had the state. Without the session the
script keeps its own checkpoint in OUT every ten steps, as torchrun's users do.
"""

import logging
import os
import re
import sys
import time
import zlib
from pathlib import Path

BEGAN = time.monotonic()

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEP_SECONDS = 0.02  # what a step computes for, beside its collectives
WIDTH = 256


def build_net() -> torch.nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))


def build() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = DistributedDataParallel(build_net())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def learn(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step * 64 + rank))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    time.sleep(STEP_SECONDS)
    optimizer.step()


def say(diary: object, step: int, model: torch.nn.Module) -> None:
    write_line(diary, dist.get_rank(), dist.get_world_size(), step, model)


def write_line(diary: object, rank: int, world: int, step: int, model: torch.nn.Module) -> None:
    at = time.monotonic()
    checksum = zlib.crc32(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy())
    print(os.getpid(), rank, world, step, checksum, at, file=diary)  # type: ignore[call-overload]


def came(out: Path, began: float, formed: float, restored: float) -> None:
    with (out / f"{os.getpid()}.rounds").open("a") as file:
        print(began, formed, restored, file=file)


class Rounds(logging.Handler):
    """The session says of each round how long it took."""

    TOLD = re.compile(r"round \d+: .* formed in (\d+) ms, in sync in (\d+) ms")

    def __init__(self, out: Path) -> None:
        super().__init__(logging.INFO)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        if (found := self.TOLD.match(record.getMessage())) is not None:
            now, formed, settled = time.monotonic(), int(found[1]) / 1e3, int(found[2]) / 1e3
            came(self._out, now - settled - formed, now - settled, now)


def plain(out: Path) -> None:
    dist.init_process_group("gloo")
    formed = time.monotonic()
    model, optimizer = build()
    saved = out / "checkpoint.pt"
    step = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    came(out, BEGAN, formed, time.monotonic())
    with (out / f"{os.getpid()}.steps").open("a", buffering=1) as diary:
        while True:
            learn(model, optimizer, step, dist.get_rank())
            step += 1
            say(diary, step, model)
            if step % 10 == 0 and dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, saved.with_suffix(".new"))
                saved.with_suffix(".new").rename(saved)


def with_session(out: Path) -> None:
    import everstep  # noqa: PLC0415 - the other columns need nothing of ours

    told = logging.getLogger("everstep.train")
    told.setLevel(logging.INFO)
    told.addHandler(Rounds(out))
    with everstep.start() as run:
        model, optimizer = build()
        run.track(model=model, optimizer=optimizer)
        with (out / f"{os.getpid()}.steps").open("a", buffering=1) as diary:
            for step in run.steps(until=10**9):
                with step:
                    learn(model, optimizer, step.number, dist.get_rank())
                if step.completed:
                    say(diary, run.step, model)


if __name__ == "__main__":
    (with_session if "--session" in sys.argv else plain)(Path(sys.argv[1]))
