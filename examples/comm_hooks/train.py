"""Compressed gradients: a communication hook of DDP that sends fewer bytes, with error feedback that commits hold.

everstep-run --nproc-per-node 2 train.py --method top     two processes; kill one
everstep-run --nproc-per-node 4 train.py --method sign    one bit of each value
kubectl apply -f job.yaml                                 workers on a cluster; delete one, scale the job
"""

import argparse

import torch
import torch.distributed as dist
from compression import Compression, hook
from hooks import METHODS, sent
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import everstep

TRAIN = 1440  # of 1,797 images; the others are the test set


def network() -> torch.nn.Module:
    """Images [rows, 64] to classes [rows, 10]."""
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        module = network().to(run.device)
        compression = Compression(module, args.method, args.average_every)
        model = DistributedDataParallel(module) if dist.is_initialized() else module
        if dist.is_initialized():
            model.register_comm_hook(compression, hook)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        run.track(model=model, optimizer=optimizer, compression=compression)
        data = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=96, seed=0)
        for step in run.steps(data, until=args.steps):
            with step as batch:
                pixels, digits = batch.to(run.device).data
                loss = batch.scale(cross_entropy(model(pixels), digits))
                loss.backward()
                compression.meet()
                optimizer.step()
                optimizer.zero_grad()
                compression.step()
                run.log(loss=loss, bytes=sent[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--method", choices=(*METHODS, "powersgd"), default="top", help="how gradients are averaged")
    parser.add_argument("--average-every", type=int, default=24, help="steps between two averages of the rests")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    args = parser.parse_args()
    if args.average_every < 1:
        parser.error("--average-every: the rests are averaged in each step, with 1, or in fewer of them")
    main(args)
