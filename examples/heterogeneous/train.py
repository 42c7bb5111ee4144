"""Unequal workers: each takes as many samples of a batch as it is fast, and the gradient is that of the whole batch.

python train.py                              one process
everstep-run --nproc-per-node 3 train.py     three processes; kill one
kubectl apply -f job.yaml                    workers on unequal nodes; delete one, scale the job

Each worker measures its time for a sample. From these times all compute the same shares. The loaders of a session give
ranks equal shares, so the script takes its samples itself, and the place in their order is tracked.
"""

import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import everstep

TRAIN, BATCH = 1440, 96  # 1,440 of 1,797 images are 15 whole batches; the others are the test set


def network() -> torch.nn.Module:
    """Images [rows, 64] to classes [rows, 10]."""
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def shares(speeds: list[float], batch: int) -> list[int]:
    """Whole samples for each rank, in all `batch`, at least one. Each sample in turn goes to the rank that would finish
    it first."""
    found = [1] * len(speeds)
    for _ in range(batch - len(speeds)):
        found[min(range(len(speeds)), key=lambda rank: (found[rank] + 1) / speeds[rank])] += 1
    return found


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        module = network().to(run.device)
        model = DistributedDataParallel(module) if dist.is_initialized() else module
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
        carried = {"shares": [], "seconds": []}  # of this world: samples of each rank, and its time for one
        run.track(model=model, optimizer=optimizer, carried=carried)
        for step in run.steps(until=args.steps):
            with step:
                if len(carried["shares"]) != run.world_size:
                    carried.update(shares=shares([1.0] * run.world_size, BATCH), seconds=[0.0] * run.world_size)
                epoch, position = divmod(step.number * BATCH, TRAIN)
                order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(epoch))[position:][:BATCH]
                mine = order.split(carried["shares"])[run.rank]
                began = time.perf_counter()
                # DDP makes the mean over the ranks: so this sum becomes the mean over the batch.
                loss = cross_entropy(model(x[mine].to(run.device)), y[mine].to(run.device), reduction="sum")
                lost = time.perf_counter() - began
                (loss * run.world_size / BATCH).backward()
                seconds = torch.zeros(run.world_size)
                seconds[run.rank] = lost / len(mine)
                if dist.is_initialized():
                    dist.all_reduce(seconds)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss / len(mine), samples=len(mine))
                old = carried["seconds"]
                carried["seconds"] = [0.7 * a + 0.3 * b if a else b for a, b in zip(old, seconds.tolist(), strict=True)]
                if (step.number + 1) % args.adapt == 0:
                    carried["shares"] = shares([1 / max(s, 1e-9) for s in carried["seconds"]], BATCH)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--adapt", type=int, default=10, help="steps between two changes of the shares")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    args = parser.parse_args()
    if args.adapt < 1:
        parser.error("--adapt: shares change after 1 step or more; with more than --steps they stay equal")
    main(args)
