"""The script of the recovery benchmark, with and without the session: DDP on a small net, one line a step.

    train.py OUT [--session]

A line: pid, rank, world size, completed steps, seconds of the monotonic clock. Without the session it keeps its own
checkpoint in OUT every ten steps, as torchrun's users do.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEP_SECONDS = 0.02  # what a step computes for, beside its collectives
WIDTH = 256


def build() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
    model = DistributedDataParallel(net)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def learn(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step * 64 + rank))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    time.sleep(STEP_SECONDS)
    optimizer.step()


def say(diary: object, step: int) -> None:
    print(os.getpid(), dist.get_rank(), dist.get_world_size(), step, time.monotonic(), file=diary)  # type: ignore[call-overload]


def plain(out: Path) -> None:
    dist.init_process_group("gloo")
    model, optimizer = build()
    saved = out / "checkpoint.pt"
    step = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    with (out / f"{os.getpid()}.steps").open("a", buffering=1) as diary:
        while True:
            learn(model, optimizer, step, dist.get_rank())
            step += 1
            say(diary, step)
            if step % 10 == 0 and dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, saved.with_suffix(".new"))
                saved.with_suffix(".new").rename(saved)


def with_session(out: Path) -> None:
    import everstep  # noqa: PLC0415 - the other columns need nothing of ours

    with everstep.start() as run:
        model, optimizer = build()
        run.track(model=model, optimizer=optimizer)
        with (out / f"{os.getpid()}.steps").open("a", buffering=1) as diary:
            for step in run.steps(until=10**9):
                with step:
                    learn(model, optimizer, step.number, dist.get_rank())
                if step.completed:
                    say(diary, run.step)


if __name__ == "__main__":
    (with_session if "--session" in sys.argv else plain)(Path(sys.argv[1]))
