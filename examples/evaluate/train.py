"""An evaluation on all ranks that counts each sample of the test set once, at any number of ranks.

python train.py                              one process
everstep-run --nproc-per-node 3 train.py     three processes; kill one
kubectl apply -f job.yaml                    workers on a cluster; delete one, scale the job
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import everstep

TRAIN, CLASSES = 1440, 10  # of 1,797 images; the other 357 are the test set, which two or four ranks do not divide


def metrics(confusion: torch.Tensor) -> dict[str, float]:
    """`confusion`: how many samples of each class [row] were taken for each [column]."""
    right, there, found = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    # Of a mean over the ranks' own metrics neither would come: their shares differ in size, and F1 is no mean.
    return {
        "samples": there.sum().item(),
        "accuracy": (right.sum() / there.sum()).item(),
        "f1": (2 * right / (there + found).clamp(min=1)).mean().item(),
    }


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        network = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, CLASSES)
        ).to(run.device)
        model = DistributedDataParallel(network) if dist.is_initialized() else network
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
        history: dict[str, dict[str, float]] = {}  # the metrics of each evaluation, by its step
        run.track(model=model, optimizer=optimizer, history=history)
        data = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=96, seed=0)

        def evaluate() -> dict[str, float]:
            # Not through DDP, whose ranks would have to have equally many batches.
            network.eval()
            confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.float64)
            mine = torch.arange(TRAIN + run.rank, len(x), run.world_size)
            with torch.no_grad():
                for rows in mine.split(32):
                    taken_for = network(x[rows].to(run.device)).argmax(1).cpu()
                    confusion.index_put_((y[rows], taken_for), torch.ones(len(rows)).double(), accumulate=True)
            if dist.is_initialized():
                confusion = confusion.to(run.device)
                dist.all_reduce(confusion)
            history[str(run.step)] = metrics(confusion.cpu())
            return history[str(run.step)]

        run.evaluate(evaluate, every=20)
        for step in run.steps(data, until=args.steps):
            with step as batch:
                pixels, digits = batch.to(run.device).data
                loss = batch.scale(cross_entropy(model(pixels), digits))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
