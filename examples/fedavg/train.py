"""Federated averaging: in each round some clients train the model on data of their own, and the server averages them.

    everstep-run --nproc-per-node 3 train.py     three processes that play the clients; kill one
    kubectl apply -f job.yaml                    workers on a cluster; delete one, scale the job

McMahan et al. (2017). A client has images of at most two digits, and another number of them than the next client. A
step of the session is a round, and a sample of its loader is a client. Every client takes part once in an epoch of
rounds. What a client does depends on the round and the client alone, not on the rank that plays it.
"""

import argparse
import copy

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import everstep

TRAIN, CLIENTS, EACH_ROUND = 1440, 24, 12  # of 1,797 images the others are the test set


def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 64] in 0..1 and labels [1797]."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 16, torch.from_numpy(labels)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def clients(labels: Tensor) -> list[Tensor]:
    """Which of the images each client has: two pieces of those that are sorted by label, longer and shorter ones."""
    sizes = torch.tensor([20, 40]).repeat(CLIENTS)
    pieces = labels.argsort(stable=True).split(sizes.tolist())
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist()
    return [torch.cat([pieces[one], pieces[other]]) for one, other in zip(order[::2], order[1::2], strict=True)]


def trained(model: nn.Module, x: Tensor, y: Tensor, part: Tensor, seed: int) -> tuple[nn.Module, float]:
    """The model after two epochs of a client over its part of the images, and its last loss."""
    mine = copy.deepcopy(model)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    chance = torch.Generator().manual_seed(seed)
    for _ in range(2):
        for rows in part[torch.randperm(len(part), generator=chance)].split(10):
            loss = cross_entropy(mine(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return mine, loss.item()


def give_gradients(model: nn.Module, flat: Tensor) -> None:
    """`flat` [parameters] becomes the gradients of `model`."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), flat.split(sizes), strict=True):
        parameter.grad = gradient.view_as(parameter).clone()


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = digits()
    parts = clients(y[:TRAIN])
    with everstep.start(args.checkpoint, every_steps=args.every_rounds) as run:
        x, y = x.to(run.device), y.to(run.device)
        model = network().to(run.device)
        server = torch.optim.SGD(model.parameters(), lr=1.0)  # with momentum it is FedAvgM
        run.track(model=model, server=server)
        data = run.loader(torch.arange(CLIENTS), global_batch=EACH_ROUND, micro_batch=1, seed=0)
        for step in run.steps(data, until=args.rounds):
            with step as batches:
                with torch.no_grad():
                    before = parameters_to_vector(model.parameters())
                total = torch.zeros(len(before) + 1, device=run.device)  # changes of clients by their shares; shares
                for batch in batches:
                    client = int(batch.data)
                    mine, loss = trained(model, x, y, parts[client], seed=step.number * CLIENTS + client)
                    with torch.no_grad():
                        share = batch.weight * len(parts[client])  # clients count by their images
                        total[:-1] += share * (before - parameters_to_vector(mine.parameters()))
                        total[-1] += share
                    run.log(loss=loss)
                if dist.is_initialized():
                    dist.all_reduce(total)  # the only traffic of the round
                give_gradients(model, total[:-1] / total[-1])
                server.step()
                server.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--every-rounds", type=int, help="between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
