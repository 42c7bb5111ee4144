"""Large batches: the batch grows with the workers, and the learning rate with the batch. LAMB or LARS keep it stable.

python train.py                              one process
everstep-run --nproc-per-node 3 train.py     three processes; kill one
kubectl apply -f job.yaml                    workers on a cluster; scale the job

The loaders of a session keep the global batch. Here each worker's batch is constant, so the script takes its samples
itself, and the place in their order is tracked.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import everstep

TRAIN = 1440  # of 1,797 images; the others are the test set
BATCH = 96  # the batch for which --rate is meant


class Layerwise(torch.optim.Optimizer):
    """Each tensor moves by its own norm times the rate. LARS: You, Gitman, Ginsburg 2017; LAMB: You et al. 2019."""

    def __init__(self, parameters: object, lr: float, lamb: bool, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "lamb": lamb, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["step"] += 1
                if group["lamb"]:
                    mean, square = state["mean"].lerp_(p.grad, 0.1), state["square"].lerp_(p.grad.square(), 0.001)
                    first, second = 1 - 0.9 ** state["step"], 1 - 0.999 ** state["step"]
                    change = mean / first / ((square / second).sqrt() + 1e-6) + group["decay"] * p
                else:
                    change = p.grad + group["decay"] * p
                ratio = p.norm() / change.norm()
                # A tensor of zeros, as a bias may be at first, moves by the rate alone.
                change = change * torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)
                if not group["lamb"]:
                    change = state["mean"].mul_(0.9).add_(change, alpha=0.1)
                p.sub_(change, alpha=group["lr"])


def samples(position: int, count: int) -> torch.Tensor:
    """`count` indices from `position` on, in an endless row of epochs; each is shuffled by its number."""
    first, last = position // TRAIN, (position + count - 1) // TRAIN
    orders = [torch.randperm(TRAIN, generator=torch.Generator().manual_seed(e)) for e in range(first, last + 1)]
    return torch.cat(orders)[position - first * TRAIN :][:count]


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        network.to(run.device)
        model = DistributedDataParallel(network) if dist.is_initialized() else network
        optimizer = Layerwise(network.parameters(), lr=0.0, lamb=args.optimizer == "lamb")
        # The rate goes from `start` to `goal` in the steps from `since` on; each goal is noted in `resizes`.
        carried = {"position": 0, "batch": 0, "since": 0, "start": 0.0, "goal": 0.0, "resizes": []}
        run.track(model=model, optimizer=optimizer, carried=carried)
        for step in run.steps(until=args.steps):
            with step:
                batch = args.batch * run.world_size
                group = optimizer.param_groups[0]
                if batch != carried["batch"]:
                    goal = args.rate * batch / BATCH
                    carried.update(batch=batch, since=step.number, start=group["lr"], goal=goal)
                    carried["resizes"].append([step.number, run.world_size, batch, goal])
                part = min(1.0, (step.number - carried["since"] + 1) / args.warm_up)
                group["lr"] = carried["start"] + (carried["goal"] - carried["start"]) * part
                mine = samples(carried["position"], batch)[run.rank * args.batch :][: args.batch]
                loss = cross_entropy(model(x[mine].to(run.device)), y[mine].to(run.device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                carried["position"] += batch
                run.log(loss=loss, rate=group["lr"], batch=batch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--batch", type=int, default=32, help="samples of a worker in a step")
    parser.add_argument("--rate", type=float, default=0.01, help=f"learning rate of a batch of {BATCH}")
    parser.add_argument("--warm-up", type=int, default=20, help="steps in which the rate goes to a new goal")
    parser.add_argument("--optimizer", choices=("lamb", "lars"), default="lamb")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    args = parser.parse_args()
    if args.batch < 1:
        parser.error("--batch: a worker needs 1 sample or more in a step")
    if args.warm_up < 1:
        parser.error("--warm-up: the rate goes to a goal in 1 step or more")
    main(args)
