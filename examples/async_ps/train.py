"""An asynchronous parameter server: each worker computes gradients at its own pace, and no worker is far ahead.

    everstep run job.yaml --checkpoint commits             a server and three workers as processes here; kill any
    kubectl apply -f job.yaml                              the same as pods on a cluster
    python train.py --checkpoint commits                   the server alone; then, as often as you like:
    python train.py --checkpoint commits --role worker

Stale synchronous parallel: Ho et al. (2013). A worker that is more than `--bound` gradients ahead of the slowest one
waits for it. Worker 0 of the job is the server. A step of the session is one gradient.
"""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import everstep
from everstep.roles import Ask, Hub, follow

TRAIN = 1440  # of 1,797 images; the others are the test set


def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 64] in 0..1 and labels [1797]."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 16, torch.from_numpy(labels)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def serve(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    # Gradients come from other processes, so they differ each time: there is nothing to compare after a restart.
    with everstep.start(args.checkpoint, every_steps=args.every_steps, compare_gradients=False) as run:
        model = network().to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        staleness: dict[str, int] = {}  # how many gradients were so many versions old
        run.track(model=model, optimizer=optimizer, staleness=staleness)
        table = Table(args.bound)
        run.untracked("table")  # a gradient that the server had not applied is lost with it
        with Hub(table.answer, table.left, url=args.checkpoint):
            for step in run.steps(until=args.steps):
                table.publish(step.number, model)
                with step:
                    given = table.take()
                    for parameter, gradient in zip(model.parameters(), given["gradients"], strict=True):
                        parameter.grad = gradient.to(run.device)
                    optimizer.step()
                    optimizer.zero_grad()
                    age = step.number - given["version"]
                    staleness[str(age)] = staleness.get(str(age), 0) + 1
                    run.log(loss=given["loss"], staleness=age)


def work(ask: Ask) -> None:
    """Compute gradients until the connection to the server ends."""
    (x, y), model, chance = digits(), network(), torch.Generator()
    chance.seed()
    now = ask(None)
    while True:
        model.load_state_dict(now["parameters"])
        rows = torch.randint(TRAIN, (32,), generator=chance)
        loss = cross_entropy(model(x[rows]), y[rows])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        now = ask({"version": now["version"], "gradients": gradients, "loss": loss.item()})


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if args.role == "server":
        serve(args)
    else:
        follow(work, url=args.checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    first = os.environ.get("EVERSTEP_WORKER_INDEX", "0") == "0"  # of a TrainingJob's workers
    parser.add_argument("--role", choices=("server", "worker"), default="server" if first else "worker")
    parser.add_argument("--steps", type=int, default=2000, help="gradients in all")
    parser.add_argument("--bound", type=int, default=3, help="gradients that a worker may be ahead of the slowest")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    args = parser.parse_args()
    if args.bound < 0:
        parser.error("--bound: with less than 0 no worker may begin; with 0 all give as many gradients")
    main(args)
