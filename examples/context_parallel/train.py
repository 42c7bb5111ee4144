"""Context parallelism: each rank of a replica has a part of every text, and attends to keys and values of all parts.

    everstep-run --nproc-per-node 4 train.py --ranks 2     two replicas of two ranks; kill one process
    kubectl apply -f job.yaml                              workers on a cluster; delete one, scale the job

Parameters are whole on each rank, but for the table of places. Only attention needs other tokens: keys and values are
gathered for it, and their gradients go back to the ranks that own them.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import TensorDataset

import everstep

LENGTH = 32  # characters of a sample
WIDTH, HEADS, BLOCKS, ALPHABET = 32, 4, 2, 128


class Gather(torch.autograd.Function):
    """[tokens of this rank, …] to [tokens of all ranks, …]. All use a token: its gradient is a sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.tokens = group, len(x)
        whole = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
        dist.all_gather_single(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group) * ctx.tokens :][: ctx.tokens], None


class Block(nn.Module):
    """[tokens, rows, WIDTH] to the same, for this rank's part of the tokens; a token sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.both, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, first: int, group: dist.ProcessGroup | None) -> Tensor:
        y = self.before(x)
        both = self.both(y) if group is None else Gather.apply(self.both(y), group)
        parts = (self.query(y), *both.chunk(2, -1))
        query, key, value = (part.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for part in parts)
        visible = torch.arange(len(both)) <= first + torch.arange(len(x))[:, None]
        seen = scaled_dot_product_attention(query, key, value, attn_mask=visible.to(x.device))
        x = x + self.out(seen.permute(2, 0, 1, 3).flatten(2))
        return x + self.down(gelu(self.up(self.between(x))))


class Network(nn.Module):
    """Characters [rows, tokens] to logits of the next ones [rows, tokens, ALPHABET]. The tokens are this rank's part of
    the texts; without a mesh they are whole texts."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.group = None if mesh is None else mesh.get_group()
        places = torch.randn(LENGTH, WIDTH) / 10
        self.places = nn.Parameter(places if mesh is None else distribute_tensor(places, mesh, [Shard(0)]))
        self.words = nn.Embedding(ALPHABET, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ALPHABET)

    def forward(self, text: Tensor) -> Tensor:
        first = 0 if self.group is None else dist.get_rank(self.group) * text.shape[1]
        places = self.places.to_local() if isinstance(self.places, DTensor) else self.places
        x = self.words(text.T) + places[:, None]
        for block in self.blocks:
            x = block(x, first, self.group)
        return self.head(self.norm(x)).transpose(0, 1)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = torch.tensor(list(args.text.read_text().encode("ascii", "replace")))
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        mesh = run.mesh(tensor=args.ranks)["tensor"]
        model, group = Network(mesh).to(run.device), mesh.get_group()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        run.track(model=model, optimizer=optimizer)
        tokens = LENGTH // args.ranks
        for step in run.steps(run.loader(TensorDataset(rows), global_batch=32, seed=0), until=args.steps):
            with step as batch:
                (characters,) = batch.to(run.device).data
                mine = characters[:, dist.get_rank(group) * tokens :][:, : tokens + 1]
                logits = model(mine[:, :-1]).flatten(0, 1)
                loss = batch.scale(cross_entropy(logits, mine[:, 1:].flatten()) / args.ranks)
                loss.backward()
                for p in model.parameters():
                    if not isinstance(p, DTensor):  # each rank has the part of its tokens
                        dist.all_reduce(p.grad, group=group)
                run.average_gradients(model)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss * args.ranks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), default=2, help="ranks that divide a text")
    parser.add_argument("--text", type=Path, default=Path(os.__file__), help="a text file (default: a Python module)")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
