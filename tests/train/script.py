"""The training script that the session's tests run under every launcher: dropout, a scheduler, an uneven batch."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import xxhash
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import everstep
from everstep.data.workers import DEFAULT_CONTEXT


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """1,000 points of a fixed function; each item tells which it is."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([index / 1000, (index % 10) / 10, 1.0])
        return x, (x.sum() ** 2).reshape(1)


def until_committed(folder: str) -> None:
    """Wait for a commit: a second record after the one that opened the log."""
    deadline = time.monotonic() + 120  # a busy disk may take long over an fsync
    # One that is still being written has a name that begins with a dot.
    while len(list((Path(folder) / "log").glob("[0-9]*.json"))) < 2:
        assert time.monotonic() < deadline, "nothing is committed"
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--until", type=int, default=40)
    parser.add_argument("--every-steps", type=int)
    parser.add_argument("--every-seconds", type=float)
    parser.add_argument("--global-batch", type=int, default=50)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--context", help="how workers are started")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--seen", type=Path, help="folder for the samples of each completed step")
    parser.add_argument("--die-at", type=int, help="SIGKILL in this step, after a commit")
    parser.add_argument("--losses", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = {"every_steps": args.every_steps, "every_seconds": args.every_seconds}
    with everstep.start(args.url, **options) as run:
        net = torch.nn.Sequential(
            torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Dropout(args.dropout), torch.nn.Linear(16, 1)
        )
        model = DistributedDataParallel(net) if run.world_size > 1 else net
        if run.world_size > 1:
            torch.manual_seed(1 + run.rank)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        run.track(model=net, optimizer=optimizer, scheduler=scheduler)
        loader = run.loader(
            Numbers(),
            global_batch=args.global_batch,
            num_workers=args.workers,
            micro_batch=args.micro_batch,
            multiprocessing_context=args.context or DEFAULT_CONTEXT,
        )
        for step in run.steps(loader, until=args.until):
            if step.number == 0 or (run.step == step.number and not hasattr(main, "said")):
                main.said = True  # type: ignore[attr-defined]
                print(f"start step={step.number} rank={run.rank} world={run.world_size} pid={os.getpid()}", flush=True)
            indices, total = [], 0.0
            with step as got:
                for batch in [got] if args.micro_batch is None else got:
                    loss = mse_loss(model(batch.data[0]), batch.data[1])
                    batch.scale(loss).backward()
                    indices += batch.indices[: batch.count].tolist()
                    total += float(loss.detach()) * batch.count
                    if step.number == args.die_at:
                        until_committed(args.url)
                        os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                run.log(loss=loss)
                time.sleep(args.pause)
            if args.seen:
                record = {"step": step.number, "rank": run.rank, "indices": indices, "loss": total}
                with (args.seen / f"{os.getpid()}.jsonl").open("a") as file:
                    file.write(json.dumps(record) + "\n")
        if run.rank == 0:
            flat = torch.cat([p.detach().flatten() for p in net.parameters()])
            print(f"done step={run.step} parameters={xxhash.xxh3_128_hexdigest(flat.numpy().tobytes())}", flush=True)
            print("values=" + json.dumps(flat.tolist()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
