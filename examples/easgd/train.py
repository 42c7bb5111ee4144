"""Elastic averaging SGD: each rank's model explores, and a spring ties it to a centre that all share.

    everstep-run --nproc-per-node 3 train.py     three processes; kill one
    kubectl apply -f job.yaml                    workers on a cluster; delete one, scale the job

Zhang, Choromanska and LeCun (2015), the synchronous form with period `--period`. A step of the session is a period. The
ranks exchange their models at its end, so each can move the centre by itself, and a new process gets the explorer of
its rank. That takes memory for as many models as there are ranks.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

import everstep

TRAIN, EACH_PERIOD = 1440, 288  # of 1,797 images, those that are not for training are the test set


def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 64] in 0..1 and labels [1797]."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 16, torch.from_numpy(labels)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@torch.no_grad()
def flat(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters())


@torch.no_grad()
def assign(model: nn.Module, values: Tensor) -> None:
    """The parameters of `model` become `values` [parameters]."""
    parts = values.split([parameter.numel() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.copy_(part.view_as(parameter))


def exchanged(mine: Tensor, ranks: int) -> list[Tensor]:
    """The values of each rank, by rank."""
    if not dist.is_initialized():
        return [mine]
    found = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(found, mine)  # the only traffic of the period
    return found


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = digits()
    with everstep.start(args.checkpoint, every_steps=args.every_periods) as run:
        centre = network().to(run.device)
        explorers: list[Tensor] = []  # by rank
        run.track(centre=centre, explorers=explorers)
        small = EACH_PERIOD // 3 // args.period
        data = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=EACH_PERIOD, micro_batch=small, seed=0)
        for step in run.steps(data, until=args.periods):
            with step as batches:
                model, middle = network().to(run.device), flat(centre)
                # A rank that the last period did not have begins at the centre.
                assign(model, explorers[run.rank] if run.rank < len(explorers) else middle)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for batch in batches:
                    images, labels = batch.to(run.device).data
                    loss = cross_entropy(model(images), labels)
                    # Fewer ranks make more local steps, and shorter ones: they go as far in a period.
                    (args.period * batch.scale(loss)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found = exchanged(flat(model), run.world_size)
                pull = [args.elasticity / run.world_size * (one - middle) for one in found]
                explorers[:] = [one - force for one, force in zip(found, pull, strict=True)]
                assign(centre, middle + torch.stack(pull).sum(0))
                run.log(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--periods", type=int, default=100)
    each = EACH_PERIOD // 3  # samples of one of three ranks, in equal batches
    periods = [n for n in range(1, each + 1) if each % n == 0]
    parser.add_argument("--period", type=int, choices=periods, default=12, help="local steps of a rank, of three ranks")
    parser.add_argument("--elasticity", type=float, default=0.9, help="the sum of all springs: beta in the paper")
    parser.add_argument("--every-periods", type=int, help="between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
