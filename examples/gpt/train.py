"""A small transformer learns the characters of a text: warm-up and cosine, evaluation with samples, and curves.

everstep-run --nproc-per-node 3 train.py     three processes; kill one
kubectl apply -f job.yaml                    workers on a cluster; delete one, scale the job
"""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from curves import curves
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import everstep

LENGTH, ALPHABET, WIDTH, HEADS, LAYERS = 64, 128, 64, 4, 2
WARM_UP = 20  # steps, before a cosine down to a tenth


class Block(nn.Module):
    """[rows, length, WIDTH] to the same; a place sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.attention(self.norms[0](x)).chunk(3, -1))
        seen = scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        return x + self.outer(nn.functional.gelu(self.inner(self.norms[1](x))))


class Transformer(nn.Module):
    """Characters [rows, length] to scores of the next ones [rows, length, ALPHABET]."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(ALPHABET, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, ALPHABET)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.characters(tokens) + self.places.weight[: tokens.shape[1]]))


def pieces(text: str) -> Tensor:
    """[pieces, LENGTH + 1]: each begins with the last character of the one before; others than ASCII become `?`."""
    return torch.tensor(list(text.encode("ascii", "replace"))).unfold(0, LENGTH + 1, LENGTH)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def sample(model: nn.Module, device: torch.device) -> str:
    tokens = torch.tensor([list(b"def ")], device=device)
    for _ in range(60):
        chances = (model(tokens[:, -LENGTH:])[:, -1] / 0.8).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
    return bytes(tokens[0].tolist()).decode()


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = pieces(args.text.read_text())
    if len(data) < 10:
        raise SystemExit(f"--text {args.text}: {10 * LENGTH + 1} characters or more are needed, a tenth to evaluate")
    training, kept = data[len(data) // 10 :], data[: len(data) // 10]
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        network = Transformer().to(run.device)
        model = DistributedDataParallel(network) if dist.is_initialized() else network
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.1)
        rate = LambdaLR(optimizer, lambda n: min((n + 1) / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * n / args.steps)))
        run.track(model=model, optimizer=optimizer, rate=rate)
        log, log_evaluation = curves(run, args.curves)

        def evaluate() -> dict[str, float]:
            network.eval()
            mine = kept[run.rank :: run.world_size].to(run.device)
            with torch.no_grad():
                total = loss_of(network, mine) * len(mine) if len(mine) else torch.zeros((), device=run.device)
            if dist.is_initialized():
                dist.all_reduce(total)
            bits = total.item() / len(kept) / math.log(2)
            if run.rank == 0:
                print(f"step {run.step}: {bits:.4f} bits a character; {sample(network, run.device)!r}", flush=True)
            log_evaluation(bits=bits)
            return {"bits": bits}

        run.evaluate(evaluate, every=args.evaluate_every)
        for step in run.steps(run.loader(training, global_batch=24, seed=0), until=args.steps):
            with step as batch:
                loss = loss_of(model, batch.to(run.device).data)
                batch.scale(loss).backward()
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                rate.step()
                run.log(loss=loss, rate=rate.get_last_lr()[0])
            log(step, loss=loss, rate=rate.get_last_lr()[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--evaluate-every", type=int, default=100)
    parser.add_argument("--text", type=Path, default=Path(os.__file__), help="a text file (default: a Python module)")
    parser.add_argument("--curves", help="a folder or URL that all workers reach, for TensorBoard")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
