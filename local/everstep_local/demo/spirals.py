"""A network learns which of three spirals a point lies on, as an elastic run: processes may die, come and go.

everstep run spirals.py --workers 3 --elastic 2:4      and from another terminal: everstep kill spirals-w1-0
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import everstep

ARMS, POINTS, HELD_OUT = 3, 1800, 360


def spirals() -> tuple[torch.Tensor, torch.Tensor]:
    """Points [1800, 2] in the order of a fixed permutation, and the arm of each."""
    generator = torch.Generator().manual_seed(0)
    arm = torch.randperm(POINTS, generator=generator) % ARMS
    along = torch.rand(POINTS, generator=generator)
    angle = 4 * along + arm * (2 * torch.pi / ARMS) + 0.1 * torch.randn(POINTS, generator=generator)
    return torch.stack([along * angle.cos(), along * angle.sin()], 1), arm


def main(steps: int, step_seconds: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    points, arms = spirals()
    with everstep.start(every_steps=200) as run:
        network = torch.nn.Sequential(
            torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, ARMS)
        )
        model = DistributedDataParallel(network) if dist.is_initialized() else network
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        run.track(model=network, optimizer=optimizer)
        loader = run.loader(TensorDataset(points[HELD_OUT:], arms[HELD_OUT:]), global_batch=96, seed=0)
        for step in run.steps(loader, until=steps):
            with step as batch:
                inputs, targets = batch.data
                loss = batch.scale(cross_entropy(model(inputs), targets))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
                time.sleep(step_seconds)
            # Behind the block, because a step in which a peer was lost comes again.
            if step.completed and run.rank == 0 and run.step % 10 == 0:
                print(f"step={run.step} loss={loss.item():.4f} world={run.world_size} pid={os.getpid()}", flush=True)
        if run.rank == 0:
            with torch.no_grad():
                accuracy = (network(points[:HELD_OUT]).argmax(1) == arms[:HELD_OUT]).float().mean().item()
            print(f"final step={run.step} test_accuracy={accuracy:.4f} world={run.world_size}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=700, help="optimizer steps in all")
    parser.add_argument("--step-seconds", type=float, default=0.03, help="a pause in each step, to be hit in it")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.step_seconds)
