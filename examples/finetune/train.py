"""LoRA: a trained transformer stays as it is; small matrices beside its layers learn which file a text is from.

    python ../gpt/train.py --checkpoint base                                     a transformer,
    everstep ckpt export base weights --format safetensors                       and its weights in a file
    everstep-run --nproc-per-node 3 train.py --base weights/model.safetensors    three processes; kill one
    kubectl apply -f job.yaml                                                    workers on a cluster; delete one

Commits hold what is learned. The frozen weights come from their file, in a new process too.
"""

import argparse
import inspect
import json
import random
import textwrap

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import everstep

LENGTH, ALPHABET, WIDTH, HEADS, LAYERS = 64, 128, 64, 4, 2
TEXTS = (argparse, inspect, json.decoder, random, textwrap)  # their source code is told apart


class Block(nn.Module):
    """As in examples/gpt."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.attention(self.norms[0](x)).chunk(3, -1))
        seen = scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        return x + self.outer(gelu(self.inner(self.norms[1](x))))


class Base(nn.Module):
    """The transformer of examples/gpt without its head: characters [rows, length] to [rows, length, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(ALPHABET, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks(self.characters(tokens) + self.places.weight[: tokens.shape[1]])


class Tuned(nn.Module):
    """Characters [rows, length] to scores of the texts [rows, texts]: frozen base, adapters (Hu et al., 2021), head."""

    def __init__(self, base: Base, rank: int) -> None:
        super().__init__()
        self.base = [base.requires_grad_(False)]  # in a list: no part of this module, so it is not committed
        self.adapters, self.head = nn.ModuleList(), nn.Linear(WIDTH, len(TEXTS))
        for layer in base.modules():
            if isinstance(layer, nn.Linear):
                narrow, wide = (
                    nn.Linear(*ends, bias=False) for ends in ((layer.in_features, rank), (rank, layer.out_features))
                )
                nn.init.zeros_(wide.weight)
                self.adapters.append(nn.Sequential(narrow, wide))
                layer.register_forward_hook(
                    lambda _, inputs, output, beside=self.adapters[-1]: output + beside(inputs[0])
                )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.base[0](tokens).mean(1))


def pieces() -> TensorDataset:
    """Characters [pieces, LENGTH] of all texts, and the number of the text of each [pieces]."""
    texts = [torch.tensor(list(inspect.getsource(text).encode("ascii", "replace"))) for text in TEXTS]
    cut = [text.unfold(0, LENGTH, LENGTH) for text in texts]
    return TensorDataset(torch.cat(cut), torch.cat([torch.full((len(c),), i) for i, c in enumerate(cut)]))


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = Base()
    weights = load_file(args.base)
    base.load_state_dict({name: value for name, value in weights.items() if not name.startswith("head.")})
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        tuned = Tuned(base.to(run.device), args.rank).to(run.device)
        model = DistributedDataParallel(tuned) if dist.is_initialized() else tuned
        optimizer = torch.optim.AdamW(tuned.parameters(), lr=3e-3)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(run.loader(pieces(), global_batch=24, seed=0), until=args.steps):
            with step as batch:
                tokens, texts = batch.to(run.device).data
                loss = cross_entropy(model(tokens), texts)
                batch.scale(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="weights/model.safetensors", help="the weights of examples/gpt")
    parser.add_argument("--rank", type=int, default=2, help="of the adapters")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps in all")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
