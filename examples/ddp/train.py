"""Data parallelism with what real scripts add to it: accumulated gradients, clipping, a warm-up, an evaluation.

python train.py                              one process
everstep-run --nproc-per-node 3 train.py     three processes; kill one
kubectl apply -f job.yaml                    workers on a cluster; delete one, scale the job
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import TensorDataset

import everstep

TRAIN = 1417  # of 1,797 images: 15 batches, the last with 25, 24 and 24 for three ranks; the others are the test set


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images [1797, 64] in 0..1 and labels [1797]."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 16, torch.from_numpy(labels)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = digits()
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        network = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(args.dropout), torch.nn.Linear(128, 10)
        ).to(run.device)
        model = DistributedDataParallel(network) if dist.is_initialized() else network
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
        schedule = LinearLR(optimizer, start_factor=0.1, total_iters=20)
        run.track(model=model, optimizer=optimizer, schedule=schedule)
        data = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=96, micro_batch=8, seed=0)

        def evaluate() -> dict[str, float]:
            network.eval()
            mine = slice(TRAIN + run.rank, None, run.world_size)
            with torch.no_grad():
                right = (network(x[mine].to(run.device)).argmax(1).cpu() == y[mine]).sum().float()
            if dist.is_initialized():
                dist.all_reduce(right)
            return {"accuracy": right.item() / (len(x) - TRAIN)}

        run.evaluate(evaluate, every=50)
        for step in run.steps(data, until=args.steps):
            with step as batches:
                for batch in batches:
                    images, labels = batch.to(run.device).data
                    # Gradients travel once a step, in the backward pass of its last part.
                    quiet = contextlib.nullcontext() if batch.last or model is network else model.no_sync()
                    with quiet:
                        loss = batch.scale(cross_entropy(model(images), labels))
                        loss.backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                run.log(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
