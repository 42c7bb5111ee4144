"""A mixture of experts: each rank of a replica has some of the experts, and tokens travel to them by all-to-all.

    everstep-run --nproc-per-node 4 train.py --ranks 2     two replicas, four experts on each rank; kill one process
    kubectl apply -f job.yaml                              workers on a cluster; delete one, scale the job

The ranks of a replica see the same samples. All compute the layers that have no experts; a token's expert is computed
where it lives, for a slice of the tokens from each rank. Experts are DTensors, so that a commit loads with any --ranks.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import cross_entropy, gelu, one_hot
from torch.utils.data import TensorDataset

import everstep

TRAIN = 1440  # of 1,797 images; the others are the test set
WIDTH, HIDDEN, EXPERTS = 32, 64, 8


class Exchange(torch.autograd.Function):
    """[ranks, …] to [ranks, …]: what lies at index r goes to rank r of the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Exchange.apply(gradient, ctx.group), None


class Join(torch.autograd.Function):
    """[rows, …] of each rank to [ranks · rows, …]; each rank needs the gradient of its own rows only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows = group, len(x)
        whole = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
        dist.all_gather_single(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        first = dist.get_rank(ctx.group) * ctx.rows
        return gradient[first : first + ctx.rows], None


class Slice(torch.autograd.Function):
    """This rank's share of the rows; the gradients of all shares together are that of the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Join.apply(gradient, ctx.group), None


class Experts(nn.Module):
    """[tokens, WIDTH] to [tokens, WIDTH]: each token through the expert that the router gives it, or through none
    where that has no room left. `balance` is the loss of the newest pass; `sent` and `taken` count its tokens."""

    def __init__(self, mesh: DeviceMesh, capacity: float) -> None:
        super().__init__()
        self.mesh, self.capacity = mesh, capacity
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.inner = self.divided(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.outer = self.divided(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def divided(self, values: Tensor) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(values, self.mesh, [Shard(0)]))

    def forward(self, tokens: Tensor) -> Tensor:
        group = self.mesh.get_group()
        ranks = dist.get_world_size(group)
        chances = self.router(tokens).softmax(-1)
        share = one_hot(chances.argmax(-1), EXPERTS).float().mean(0)
        self.balance = EXPERTS * (share * chances.mean(0)).sum()

        mine, chances = Slice.apply(tokens, group), Slice.apply(chances, group)
        chance, expert = chances.max(-1)
        places = int(len(mine) / EXPERTS * self.capacity) + 1
        place = (one_hot(expert, EXPERTS).cumsum(0) - 1).gather(1, expert[:, None])[:, 0]
        fits = place < places
        slot = (expert * places + place)[fits]
        packed = mine.new_zeros(EXPERTS * places, WIDTH).index_copy(0, slot, mine[fits])
        arrived = Exchange.apply(packed.view(ranks, -1, places, WIDTH), group)
        # [local experts, ranks · places, WIDTH]
        work = arrived.transpose(0, 1).reshape(-1, ranks * places, WIDTH)
        work = gelu(work @ self.inner.to_local()) @ self.outer.to_local()
        done = Exchange.apply(work.view(-1, ranks, places, WIDTH).transpose(0, 1), group).reshape(-1, WIDTH)
        result = torch.zeros_like(mine).index_copy(0, fits.nonzero()[:, 0], done[slot] * chance[fits, None])
        return Join.apply(result, group)


class Network(nn.Module):
    """Images [rows, 64] to classes [rows, 10]; the eight lines of an image are its tokens."""

    def __init__(self, mesh: DeviceMesh, capacity: float) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.where = nn.Parameter(torch.randn(8, WIDTH) / 10)
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = Experts(mesh, capacity)
        self.head = nn.Linear(8 * WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.view(-1, 8, 8)) + self.where
        x = x + self.experts(self.norm(x).view(-1, WIDTH)).view_as(x)
        return self.head(x.flatten(1))


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        mesh = run.mesh(tensor=args.ranks)
        model = Network(mesh["tensor"], args.capacity).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=96, seed=0)
        for step in run.steps(data, until=args.steps):
            with step as batch:
                pixels, digits = batch.to(run.device).data
                loss = cross_entropy(model(pixels), digits) + args.balance * model.experts.balance
                batch.scale(loss).backward()
                run.average_gradients(model)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), default=2, help="ranks that share the experts")
    parser.add_argument("--capacity", type=float, default=1.5, help="tokens for an expert, of its even share")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the loss that spreads tokens evenly")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
