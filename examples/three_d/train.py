"""Data, tensor and pipeline parallelism at once: a replica is a grid of stages and of parts of each layer.

    everstep-run --nproc-per-node 8 train.py     two replicas of two stages, each of two ranks; kill one process
    kubectl apply -f job.yaml                    workers on a cluster; delete one, scale the job by whole replicas

A rank has the place stage * parts + part in its replica. Only the number of replicas changes in a run.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import TensorDataset

import everstep

TRAIN, BATCH = 1440, 96  # 1,440 of 1,797 images are 15 whole batches; the others are the test set
WIDTH, HIDDEN, BLOCKS = 64, 128, 4


class Sum(torch.autograd.Function):
    """Forward, what the ranks of a stage have computed, summed; their gradients are equal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Share(torch.autograd.Function):
    """Forward, what all ranks of a stage have; backward, each has a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Sum.apply(gradient, ctx.group), None


class Block(nn.Module):
    """[rows, WIDTH] to the same, and the last one to [rows, 10]. A rank has the part of the hidden values that it cuts
    out of the whole."""

    def __init__(self, index: int, part: int = 0, parts: int = 1, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group
        torch.manual_seed(index)
        up, down = torch.randn(HIDDEN, WIDTH) / WIDTH**0.5, torch.randn(WIDTH, HIDDEN) / HIDDEN**0.5
        self.up, self.down = (nn.Parameter(w.chunk(parts, i)[part].clone()) for i, w in enumerate((up, down)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10) if index == BLOCKS - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.group is None:
            return self.head(x + gelu(y @ self.up.T) @ self.down.T)
        y = gelu(Share.apply(y, self.group) @ self.up.T) @ self.down.T
        return self.head(x + Sum.apply(y, self.group))


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        size, parts, stages = args.stages * args.parts, args.parts, args.stages
        run.mesh(model=size)
        place = dist.get_rank(dist.new_subgroups(size)[0])
        stage, part = divmod(place, parts)
        firsts = range(0, run.world_size, size)
        rows = [[r + s * parts + p for p in range(parts)] for r in firsts for s in range(stages)]
        columns = [[r + s * parts + p for s in range(stages)] for r in firsts for p in range(parts)]
        (tensor, _), (pipe, _) = (dist.new_subgroups_by_enumeration(ranks) for ranks in (rows, columns))
        each = BLOCKS // stages
        model = nn.Sequential(*(Block(stage * each + i, part, parts, tensor) for i in range(each))).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run.track(model=model, optimizer=optimizer)

        def make() -> Schedule1F1B:
            """For the world of now: of fewer replicas each has more rows of a batch."""
            count = BATCH * size // run.world_size // args.micro_batches
            given = torch.empty(count, WIDTH, device=run.device, requires_grad=stage > 0)
            made = torch.empty(count, WIDTH if stage < stages - 1 else 10, device=run.device, requires_grad=True)
            one = PipelineStage(model, stage, stages, run.device, group=pipe, input_args=given, output_args=made)
            return Schedule1F1B(one, args.micro_batches, loss_fn=lambda o, t: run.scale(cross_entropy(o, t)))

        schedule = run.pipeline(make)
        data = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=BATCH, seed=0)
        for step in run.steps(data, until=args.steps):
            with step as batch:
                pixels, digits = batch.to(run.device).data
                given, target = ((pixels,) if stage == 0 else ()), (digits if stage == stages - 1 else None)
                schedule.step(*given, target=target, losses=(losses := list[Tensor]()))
                run.average_gradients(model)
                optimizer.step()
                optimizer.zero_grad()
                run.log(**({"loss": torch.stack(losses).mean()} if losses else {}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--stages", type=int, choices=(1, 2, 4), default=2, help="stages of a replica")
    parser.add_argument("--parts", type=int, choices=(1, 2, 4, 8), default=2, help="ranks that divide a layer")
    parts = [n for n in range(1, BATCH + 1) if BATCH % n == 0]
    parser.add_argument("--micro-batches", type=int, choices=parts, default=4, help="parts of a rank's batch")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
