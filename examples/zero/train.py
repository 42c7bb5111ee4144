"""ZeRO stages 1, 2 and 3: parameters, gradients and the optimizer's state divided among the ranks of a replica.

    everstep-run --nproc-per-node 4 train.py --shard 2               two replicas of two; kill one process
    everstep-run --nproc-per-node 4 train.py --shard 4               one replica: a loss costs a load of the last commit
    everstep-run --nproc-per-node 4 train.py --stage 1 --offload     the optimizer's state divided, on the CPU
    everstep-run --nproc-per-node 4 train.py --stage 1 --optimizer zero_redundancy     torch's own stage 1, with DDP
    kubectl apply -f job.yaml                                        workers on a cluster; delete one, scale the job

The optimizer's state is divided in all stages. Over the micro-batches of a step, stage 1 keeps parameters and gradients
whole, stage 2 the parameters. Stage 3 gathers a layer's parameters for each forward and each backward pass. Between two
two steps all is divided. A commit of any number of shards loads in a run of any other.

`ZeroRedundancyOptimizer` divides the optimizer's state among all ranks, by whole parameters. Each part is on one rank
only, so after a loss all ranks load the last commit.
"""

import argparse
import contextlib

import torch
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import everstep

TRAIN = 1440  # of 1,797 images; the others are the test set


class Block(torch.nn.Module):
    """[rows, width] to [rows, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(self.norm(x))


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(*[Block(64) for _ in range(3)], torch.nn.Linear(64, 10))


def build(
    mesh: DeviceMesh, stage: int, device: torch.device, offload: bool = False
) -> tuple[FSDPModule, torch.optim.Optimizer]:
    """The model, of which each rank of `mesh`'s last dimension holds a part, and its optimizer."""
    policy = CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload else OffloadPolicy()
    model = network().to(device)
    for block in model[:-1]:
        fully_shard(block, mesh=mesh, reshard_after_forward=stage == 3, offload_policy=policy)
    model = fully_shard(model, mesh=mesh, offload_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


def build_replicated(device: torch.device) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """The model, whole on each rank, and an optimizer whose state is divided among all ranks."""
    model = DistributedDataParallel(network().to(device))
    return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=2e-3)


def divide(model: FSDPModule, stage: int, last: bool) -> None:
    """Say what the next backward pass divides: all of it with the `last` micro-batch of a step."""
    model.set_requires_gradient_sync(last or stage > 1)
    model.set_reshard_after_backward(last or stage > 2)


def averaging(
    model: FSDPModule | DistributedDataParallel, stage: int, last: bool
) -> contextlib.AbstractContextManager[None]:
    """For one micro-batch: gradients are averaged when the stage says so."""
    if isinstance(model, FSDPModule):
        divide(model, stage, last)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if last else model.no_sync()


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        if args.optimizer == "zero_redundancy":
            model, optimizer = build_replicated(run.device)
        else:
            model, optimizer = build(run.mesh(shard=args.shard), args.stage, run.device, args.offload)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=96, micro_batch=12, seed=0)
        for step in run.steps(data, until=args.steps):
            with step as batches:
                for batch in batches:
                    pixels, digits = batch.to(run.device).data
                    with averaging(model, args.stage, batch.last):
                        loss = batch.scale(cross_entropy(model(pixels), digits))
                        loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--shard", type=int, default=2, help="ranks of a replica")
    parser.add_argument("--offload", action="store_true", help="parameters, gradients and optimizer rest on the CPU")
    parser.add_argument("--optimizer", choices=("adamw", "zero_redundancy"), default="adamw")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    parsed = parser.parse_args()
    if parsed.optimizer == "zero_redundancy" and (parsed.stage > 1 or parsed.offload):
        parser.error("--optimizer zero_redundancy is stage 1 without offload: write --stage 1 before it")
    main(parsed)
