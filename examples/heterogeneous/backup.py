"""Backup workers: each part of a batch is computed by two workers, and the first result counts.

everstep-run --nproc-per-node 4 backup.py     two halves of a batch, each computed twice; kill one process, or stop it

It costs twice the work, for workers that become slow without warning; train.py is for those that are always slower. All
that compute a part do so piece by piece in the same order, so the gradient has the same bits whoever was first. A
worker hears between two pieces that another has finished, and leaves the rest. It hears it under everstep-run alone,
because torch's gloo does not say whether a message has come: under torchrun each worker computes its whole part.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from train import BATCH, TRAIN, network

import everstep


def accumulate(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, piece: int, twins: list[int]) -> bool:
    """Add the gradient of a part of the batch, in pieces of so many samples. Returns whether this rank has done all of
    it before each of its `twins`, the other ranks that compute it; else its gradient does not count."""
    finished = {rank: torch.zeros(1) for rank in twins}
    told = {rank: dist.irecv(finished[rank], rank) for rank in twins}
    done = torch.ones(1)
    for images, labels in zip(x.split(piece), y.split(piece), strict=True):
        if any(work.is_completed() and finished[rank] for rank, work in told.items()):
            done.zero_()
            break
        (cross_entropy(model(images), labels, reduction="sum") / BATCH).backward()
    for work in (*(dist.isend(done, rank) for rank in twins), *told.values()):
        work.wait()
    return bool(done) and not any(finished[rank] for rank in twins if rank < dist.get_rank())


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        model = network().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(until=args.steps):
            with step:
                epoch, position = divmod(step.number * BATCH, TRAIN)
                order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(epoch))[position:][:BATCH]
                parts = max(1, run.world_size // 2)
                part = run.rank % parts
                mine = order.chunk(parts)[part]
                twins = [rank for rank in range(part, run.world_size, parts) if rank != run.rank]
                counts = accumulate(model, x[mine].to(run.device), y[mine].to(run.device), args.piece, twins)
                for parameter in model.parameters() if dist.is_initialized() else ():
                    gradient = parameter.grad if counts else torch.zeros_like(parameter)
                    dist.all_reduce(gradient)
                    parameter.grad = gradient
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--piece", type=int, default=4, help="samples that a worker computes before it listens again")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    args = parser.parse_args()
    if args.piece < 1:
        parser.error("--piece: a piece has 1 sample or more")
    main(args)
