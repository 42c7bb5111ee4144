"""Local SGD and DiLoCo: ranks train by themselves, and average what they have learned once a round.

    everstep-run --nproc-per-node 3 train.py                    DiLoCo; three processes; kill one
    everstep-run --nproc-per-node 3 train.py --outer average    periodic averaging
    kubectl apply -f job.yaml                                   workers on a cluster; delete one, scale the job

A step of the session is a round. A rank trains a copy of the model that lives for one round, so between two rounds no
rank has anything that the others lack. DiLoCo (Douillard et al., 2023) lets Nesterov's momentum carry the mean change
on; here AdamW's averages begin anew in each round, where the paper keeps them on each worker.
"""

import argparse
import copy

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

import everstep

TRAIN = 1440  # of 1,797 images: five rounds; the others are the test set
OUTER = {"average": {"lr": 1.0}, "diloco": {"lr": 0.7, "momentum": 0.9, "nesterov": True}}


def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 64] in 0..1 and labels [1797]."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 16, torch.from_numpy(labels)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


def give_gradients(model: nn.Module, flat: Tensor) -> None:
    """`flat` [parameters] becomes the gradients of `model`."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), flat.split(sizes), strict=True):
        parameter.grad = gradient.view_as(parameter).clone()


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = digits()
    with everstep.start(args.checkpoint, every_steps=args.every_rounds) as run:
        model = network().to(run.device)
        outer = torch.optim.SGD(model.parameters(), **OUTER[args.outer])
        run.track(model=model, outer=outer)
        data = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=288, micro_batch=8, seed=0)
        for step in run.steps(data, until=args.rounds):
            with step as batches:
                mine = copy.deepcopy(model)
                inner = torch.optim.AdamW(mine.parameters(), lr=2e-3)
                share = 0.0  # 1 where each rank has as many samples of the round as the others
                for batch in batches:
                    share += batch.weight
                    images, labels = batch.to(run.device).data
                    loss = cross_entropy(mine(images), labels)
                    loss.backward()
                    inner.step()
                    inner.zero_grad()
                with torch.no_grad():
                    change = parameters_to_vector(model.parameters()) - parameters_to_vector(mine.parameters())
                    change *= share / run.world_size
                if dist.is_initialized():
                    dist.all_reduce(change)  # the only traffic of the round
                give_gradients(model, change)
                outer.step()
                outer.zero_grad()
                run.log(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--outer", choices=OUTER, default="diloco", help="what becomes of the mean change")
    parser.add_argument("--every-rounds", type=int, help="between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
