"""A training script as users of the session write it, whose parameters tell which samples made them.

    everstep-run ledger.py --steps 300          torchrun ledger.py --steps 300

Beside the network there is one parameter a sample, in a parameter group of its own. Its gradient is the same for each
use of the sample, so its value is the number of uses: what was trained on twice, or not at all, shows in the committed
parameters themselves, at any world size and in any history.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import everstep

SEED = 3
BATCH = 64  # the global batch
TRAIN = 1024  # samples, 16 batches an epoch
RATE = 0.2


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 10))
        self.ledger = torch.nn.Parameter(torch.zeros(TRAIN))

    def forward(self, images: torch.Tensor, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(images), self.ledger[which]


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    x, y = torch.from_numpy(images).float()[order] / 16, torch.from_numpy(labels)[order]
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        net = Net()
        model = DistributedDataParallel(net) if dist.is_initialized() else net
        groups: list[dict[str, Any]] = [
            {"params": net.layers.parameters()},
            {"params": [net.ledger], "lr": float(BATCH), "momentum": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.998**step, lambda _: 1.0])
        run.track(model=net, optimizer=optimizer, schedule=schedule)
        loader = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=BATCH, seed=SEED)
        begun = False
        for step in run.steps(loader, until=args.steps):
            if not begun:
                begun = True
                print(f"start step={run.step} rank={run.rank} world={run.world_size} pid={os.getpid()}", flush=True)
            with step as batch:
                got, labels_ = batch.data
                logits, used = model(got, batch.indices)
                loss = cross_entropy(logits, labels_)
                batch.scale(loss - used.mean()).backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                run.log(loss=loss)
                time.sleep(args.step_seconds)
            if step.completed and (args.print_all or (run.rank == 0 and run.step % 5 == 0)):
                print(f"step={run.step} loss={loss.item():.4f} world={run.world_size}", flush=True)
        if run.rank == 0:
            tell(net, x[TRAIN:], y[TRAIN:], run.step)


def tell(net: Net, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    """The last lines, in the form of the digits example's."""
    with torch.no_grad():
        logits = net.layers(x)
        accuracy = (logits.argmax(1) == y).float().mean().item()
        loss = cross_entropy(logits, y).item()
    uses = net.ledger.detach().round().to(torch.int64)
    layers = torch.cat([p.detach().flatten() for p in net.layers.parameters()]).numpy().tobytes()
    print(f"samples={int(uses.sum())} samples_xxh3={xxhash.xxh3_128_hexdigest(uses.numpy().tobytes())}")
    print(
        f"final step={step} loss={loss:.4f} test_accuracy={accuracy:.4f}"
        f" parameters_xxh3={xxhash.xxh3_128_hexdigest(layers)}",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps in all")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="added pause")
    parser.add_argument("--print-all", action="store_true", help="every rank prints every step")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: the job's)")
    parser.add_argument("--checkpoint", default=os.environ.get("EVERSTEP_CHECKPOINT_URL", "checkpoints"))
    try:
        main(parser.parse_args())
    except (everstep.Fenced, everstep.StoreUnusable) as e:
        print(e, file=sys.stderr)
        sys.exit(e.exit_code)
