"""Sequence parallelism: between the layers that tensor parallelism divides, a rank holds a part of each text only.

    everstep-run --nproc-per-node 4 train.py --ranks 2     two replicas of two ranks; kill one process
    everstep-run --nproc-per-node 2 train.py --ranks 2     one replica: a lost process costs a load of the last commit
    kubectl apply -f job.yaml                              workers on a cluster; delete one, scale the job

Norms, residual sums and what is kept for the backward pass there are divided by tokens. The whole text is gathered in
front of a layer that is divided by columns, and the sums behind one that is divided by rows are scattered again.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import TensorDataset

import everstep

LENGTH = 32  # characters of a sample
WIDTH, HEADS, BLOCKS, ALPHABET = 32, 4, 2, 128

TOKENS = Shard(1)
PLAN = {
    "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=TOKENS),
    "places": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "blocks.*.before": SequenceParallel(),
    "blocks.*.attention": PrepareModuleInput(input_layouts=TOKENS, desired_input_layouts=Replicate()),
    "blocks.*.attention.query": ColwiseParallel(),
    "blocks.*.attention.key": ColwiseParallel(),
    "blocks.*.attention.value": ColwiseParallel(),
    "blocks.*.attention.out": RowwiseParallel(output_layouts=TOKENS),
    "blocks.*.between": SequenceParallel(),
    "blocks.*.up": ColwiseParallel(input_layouts=TOKENS),
    "blocks.*.down": RowwiseParallel(output_layouts=TOKENS),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=TOKENS, output_layouts=Replicate()),
}


class Attention(nn.Module):
    """[rows, LENGTH, WIDTH] to the same: each character sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # As many heads as this rank has: its part of a layer is narrower than WIDTH.
        query, key, value = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return self.out(scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """[rows, tokens, WIDTH] to the same; a rank has LENGTH / ranks of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention, self.between = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(gelu(self.up(self.between(x))))


class Network(nn.Module):
    """Characters [rows, LENGTH] to the logits of the next ones [rows, LENGTH, ALPHABET]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(ALPHABET, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ALPHABET)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places(torch.arange(LENGTH, device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # each process cuts its part out of the whole: all are to begin with the same
    text = torch.tensor(list(args.text.read_text().encode("ascii", "replace")))
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        mesh = run.mesh(tensor=args.ranks)
        model = parallelize_module(Network().to(run.device), mesh["tensor"], PLAN)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(run.loader(TensorDataset(rows), global_batch=32, seed=0), until=args.steps):
            with step as batch:
                (characters,) = batch.to(run.device).data
                logits = model(characters[:, :-1])
                loss = batch.scale(cross_entropy(logits.flatten(0, 1), characters[:, 1:].flatten()))
                loss.backward()
                run.average_gradients(model)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=2, help="ranks that divide layers and texts")
    parser.add_argument("--text", type=Path, default=Path(os.__file__), help="a text file (default: a Python module)")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
